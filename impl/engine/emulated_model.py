"""A model whose passes take as long as those of another on other hardware (`--devices`).

The logits are the small model's own. A pass that is done early sleeps until its time is over, so
that the decoder, its processes and its messages run as they would beside slow passes, and no core
is burnt. Prefill keeps its own time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.token_batch import TokenBatch

_SPUN_S = 2e-4  # before the end, where a sleep is too coarse


class Latency(NamedTuple):
    """Seconds of a pass by its new tokens, ascending, linear between; constant outside."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, tokens: int) -> float:
        """Seconds of a pass over so many new tokens."""
        return float(np.interp(tokens, self.tokens, self.seconds))


class EmulatedModel:
    """See the module docstring and `impl.engine.language_model.LanguageModel`."""

    def __init__(self, model: LanguageModel, latency: Latency) -> None:
        self._model = model
        self._latency = latency
        self.head_ids = model.head_ids
        self.device = model.device
        self.dtype = model.dtype

    @property
    def vocabulary(self) -> int:
        """See `LanguageModel`."""
        return self._model.vocabulary

    @property
    def max_position(self) -> int:
        """See `LanguageModel`."""
        return self._model.max_position

    @property
    def batch_invariant(self) -> bool:
        """See `LanguageModel`."""
        return self._model.batch_invariant

    @property
    def weight_bytes(self) -> int:
        """The small model's own."""
        return self._model.weight_bytes

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """See `LanguageModel`."""
        return self._model.new_cache(slots, cells)

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel`; returns when the pass's time is over."""
        end = time.perf_counter() + self._latency.of(len(batch.tokens))
        logits = self._model.forward(batch, cache, rows)
        if (left := end - time.perf_counter() - _SPUN_S) > 0:
            time.sleep(left)
        while time.perf_counter() < end:
            pass
        return logits

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel`."""
        self._model.prefill(cache, slot, tokens)
