"""The transformer on a GPU: steps of decoding are recorded once and replayed as one launch.

A pass over few tokens lasts less than its kernels take to launch one by one. So passes of a step's
shape (decode, verify K + 1, a level of branches) are CUDA graphs over fixed memory: the host copies
a batch's numbers there and launches once. Prefill and larger passes run as they are. Nothing waits
for the GPU; whoever reads the logits does. On other devices nothing is recorded, and all else is
the same: that is how it is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from impl.engine.architecture import TransformerConfig
from impl.engine.device import upload, wait_for
from impl.engine.gpu_operators import GpuOperators
from impl.engine.kv_cache import KVCache
from impl.engine.padded_batch import (
    LENGTH_STEP,
    PaddedBatch,
    PaddedInputs,
    PaddedShape,
    real_rows,
    round_up,
)
from impl.engine.token_batch import TokenBatch
from impl.engine.transformer import Transformer

PREFILL_CHUNK = 1024  # tokens of a prompt per pass
RECORDED_ROWS = (*range(1, 9), 12, 16, 24, 32, 48, 64)  # of each sequence; passes are padded to one
FIRST_LENGTH = 256  # cells that the shortest recorded pass reads; the next read twice as many


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A pass over fixed memory.

    Attributes:
        inputs: what it reads; filled before each run.
        run: gives logits [S * n, logits] in memory that the next run overwrites.
    """

    inputs: PaddedInputs
    run: Callable[[], torch.Tensor]


class GpuTransformer(Transformer):
    """See the module docstring and `impl.engine.language_model.LanguageModel`."""

    operators: GpuOperators

    def __init__(self, config: TransformerConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        self._passes: WeakKeyDictionary[KVCache, dict[PaddedShape, RecordedPass]]
        self._passes = WeakKeyDictionary()
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """See `LanguageModel`; cells are rounded up."""
        return super().new_cache(slots, round_up(cells, LENGTH_STEP))

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel.forward`; returns before the GPU is done."""
        most = max(segment.count for segment in batch.segments)
        if most > RECORDED_ROWS[-1]:
            return self._logits(_packed(self._padded(batch, cache, most), batch, most, rows))
        padded = next(n for n in RECORDED_ROWS if n >= most)
        return _packed(self._recorded(batch, cache, padded), batch, padded, rows)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel.prefill`; returns when the GPU is done."""
        cache.truncate(slot, 0)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            self._padded(TokenBatch.causal([(slot, start, chunk)]), cache, len(chunk))
            cache.truncate(slot, start + len(chunk))
        wait_for(self.device)

    def _padded(self, batch: TokenBatch, cache: KVCache, rows: int) -> torch.Tensor:
        """Hidden states [S * n, hidden] of a pass that is not recorded."""
        length = min(cache.cells, round_up(_end(batch), LENGTH_STEP))
        shape = PaddedShape.of(batch.segments, rows=rows, length=length)
        host = PaddedInputs.of(batch, shape)
        inputs = host.empty_on(self.device)
        inputs.copy_(host)
        return self._hidden(PaddedBatch.over(inputs, shape), cache)

    def _recorded(self, batch: TokenBatch, cache: KVCache, rows: int) -> torch.Tensor:
        """Logits [S * n, logits], overwritten by the next pass."""
        lengths = _lengths(cache.cells)
        length = next(n for n in lengths if n >= _end(batch))
        shape = PaddedShape.of(batch.segments, rows=rows, length=length)
        host = PaddedInputs.of(batch, shape)
        passes = self._passes.setdefault(cache, {})
        if shape not in passes:  # for all lengths at once, so that no later step has to
            for other in sorted(lengths, key=lambda n: n == length):  # its own last: it counts
                longer = shape._replace(length=other)
                passes[longer] = self._record(host, longer, cache)
        recorded = passes[shape]
        recorded.inputs.copy_(host)
        return recorded.run()

    def _record(self, host: PaddedInputs, shape: PaddedShape, cache: KVCache) -> RecordedPass:
        inputs = host.empty_on(self.device)
        inputs.copy_(host)

        def run() -> torch.Tensor:
            return self._logits(self._hidden(PaddedBatch.over(inputs, shape), cache))

        replay = run if self._pool is None else record_graph(run, self.device, self._pool)
        return RecordedPass(inputs, replay)

    def _hidden(self, batch: PaddedBatch, cache: KVCache) -> torch.Tensor:
        attention = self.operators.padded_attention
        return self._run_layers(
            batch.tokens, lambda qkv, how, i: attention(qkv, how, batch, cache, i)
        )


def record_graph(
    run: Callable[[], torch.Tensor], device: torch.device, pool: Any
) -> Callable[[], torch.Tensor]:
    """Records what `run` launches as a CUDA graph; its result is in the same memory at each replay.

    Args:
        run: launches work on fixed memory; run once beforehand, as recording demands.
        device: where.
        pool: memory that graphs share, none of which runs beside another.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.graph(graph, pool=pool):
            output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def _end(batch: TokenBatch) -> int:
    return max(segment.end for segment in batch.segments)


def _lengths(cells: int) -> list[int]:
    """The cells that recorded passes read, ascending; the last reads whole slots."""
    doubled = (FIRST_LENGTH << i for i in itertools.count())
    return [*itertools.takewhile(lambda n: n < cells, doubled), cells]


def _packed(
    padded: torch.Tensor, batch: TokenBatch, count: int, rows: torch.Tensor | slice
) -> torch.Tensor:
    """A copy of those of the padded rows [S * n] that are the wanted rows of the batch."""
    real = real_rows(batch.segments, count)
    every = isinstance(rows, slice) and rows == slice(None)
    if every and len(real) == len(padded):
        return padded.clone()
    return padded[upload(torch.tensor(real)[rows], padded.device)]
