"""Any decoder-only model of transformers behind the engine's interface: `--engine hf`.

The layers are transformers' own, at their own speed. What the engine's methods need beside them is
here: packed batches become padded ones, each token's mask says what it sees of its slot, and keys
and values are written to the engine's cache, so that rollback and branches work as ever. Whether a
model heeds such masks is not for its documentation to say: `load` compares a small tree with plain
passes, and refuses the model if they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache

from harness.errors import ModelError
from harness.messages import first_line
from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import Segment, TokenBatch

PREFILL_CHUNK = 256  # tokens of a prompt per pass
_KINDS = ("full_attention", "sliding_attention")
_TOLERANCE = {torch.float32: 1e-4}  # of the norm of the logits that are compared
_HALF_TOLERANCE = 0.05


class HuggingFaceModel:
    """See `impl.engine.language_model.LanguageModel`, and the module's docstring."""

    batch_invariant = False

    def __init__(self, model: Any, head_ids: torch.Tensor | None = None) -> None:
        """Wraps a model in evaluation mode.

        Raises:
            ModelError: its keys and values cannot be kept in slots, or it ignores masks.
        """
        self.device, self.dtype = model.device, model.dtype
        self.head_ids = None if head_ids is None else head_ids.to(self.device)
        self._model = model
        self._config = model.config.get_text_config()
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._one_row = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._windows = _windows(self._config)
        self._shape = self._probe()
        self._compare_with_plain_passes()

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_ids: torch.Tensor | None = None,
    ) -> HuggingFaceModel:
        """Reads a model folder; code in it is never run.

        Raises:
            ModelError: transformers cannot read it, or the engine's methods cannot run on it.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{folder}: transformers cannot load it: {first_line(error)}"
            ) from error
        return cls(model.eval().to(device), head_ids)

    @property
    def vocabulary(self) -> int:
        """Number of logits a pass returns for a token."""
        return int(self._config.vocab_size) if self.head_ids is None else len(self.head_ids)

    @property
    def max_position(self) -> int:
        """Most tokens of one sequence."""
        return int(self._config.max_position_embeddings)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; of a mixture of experts, a pass over one token reads fewer."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """Allocates the KV cache of `slots` sequences with `cells` cells each."""
        layers, kv_heads, head_dim = self._shape
        return KVCache(
            layers=layers,
            slots=slots,
            kv_heads=kv_heads,
            cells=cells,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel.forward`."""
        counts = torch.tensor([segment.count for segment in batch.segments])
        logits = self._run(batch, cache)
        real = torch.arange(logits.shape[1]) < counts[:, None]
        logits = logits[real.to(self.device)][rows].float()
        return logits if self.head_ids is None else logits[:, self.head_ids]

    def _run(self, batch: TokenBatch, cache: KVCache, **options: int) -> torch.Tensor:
        """Logits [sequences, width, vocabulary], behind the real tokens padding."""
        segments = batch.segments
        counts = [segment.count for segment in segments]
        width, end = max(counts), max(segment.end for segment in segments)
        tokens = batch.tokens.new_zeros(len(segments), width)
        positions = batch.positions.new_zeros(len(segments), width)
        for i, part in enumerate(torch.split(torch.arange(len(batch.tokens)), counts)):
            tokens[i, : len(part)] = batch.tokens[part]
            positions[i, : len(part)] = batch.positions[part]
        tokens = tokens.clamp(max=int(self._config.vocab_size) - 1)
        masks, slots = self._masks(segments, width, end), SlotKeysAndValues(cache, segments, end)
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        return self._call(tokens, positions, masks, slots, **options)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel.prefill`."""
        cache.truncate(slot, 0)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            batch = TokenBatch.causal([(slot, start, chunk)])
            self._run(batch, cache, **self._one_row)
            cache.truncate(slot, start + len(chunk))

    def _call(
        self, tokens: torch.Tensor, positions: Any, masks: Any, cache: Cache, **options: int
    ) -> torch.Tensor:
        """Logits [sequences, width, vocabulary] of transformers' own forward."""
        given = {"position_ids": positions, "attention_mask": masks, self._cache_argument: cache}
        logits: torch.Tensor = self._model(tokens, use_cache=True, **given, **options).logits
        return logits

    def _masks(self, segments: Sequence[Segment], width: int, end: int) -> Any:
        """Additive masks [sequences, 1, width, end], one for each kind of layer if it has two."""
        if isinstance(self._windows, dict):
            return {
                kind: self._mask(segments, width, end, window)
                for kind, window in self._windows.items()
            }
        return self._mask(segments, width, end, self._windows)

    def _mask(
        self, segments: Sequence[Segment], width: int, end: int, window: int | None
    ) -> torch.Tensor:
        seen = torch.zeros(len(segments), 1, width, end, dtype=torch.bool)
        for i, segment in enumerate(segments):
            seen[i, 0, : segment.count, : segment.end] = segment.visible(window)
            seen[i, 0, segment.count :, 0] = True  # padding: its logits are dropped
        mask = torch.zeros(seen.shape, dtype=self.dtype)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min).to(self.device)

    def _probe(self) -> tuple[int, int, int]:
        """Layers, key heads and head size, as a pass over one token shows them."""
        shapes = _Shapes()
        try:
            with torch.inference_mode():
                token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
                self._call(token, None, None, shapes)
        except Exception as error:  # whatever a model does with a cache that it does not know
            raise self._unfit(f"its cache is of another kind ({first_line(error)})") from error
        found = set(shapes.shapes.values())
        if len(found) != 1 or sorted(shapes.shapes) != list(range(len(shapes.shapes))):
            raise self._unfit("its layers do not all keep keys and values of one shape")
        kv_heads, head_dim = found.pop()
        return len(shapes.shapes), kv_heads, head_dim

    def _compare_with_plain_passes(self) -> None:
        """A chain, a branch beside it, a rollback: their logits must be those of plain passes."""
        ids = torch.arange(8) * 7919 % int(self._config.vocab_size)
        a, b, c, d, e, x = ids[:6].tolist()
        try:
            cache = self.new_cache(2, 8)
            self.prefill(cache, 1, [a, b])
            tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
            batch = TokenBatch.pack([c, d, e, x], [2, 3, 3, 4], [Segment(1, 2, 4, tree)])
            got = [self._all_logits(batch, cache)[[1, 3]]]
            cache.gather(1, [2, 4])
            batch = TokenBatch.causal([(1, 4, [d])])
            got.append(self._all_logits(batch, cache))
        except ModelError:
            raise
        except Exception as error:  # whatever a model does with masks that it does not know
            raise self._unfit(f"it takes no masks ({first_line(error)})") from error
        paths = ([a, b, c, d], [a, b, c, e, x], [a, b, c, e, d])
        with torch.inference_mode():
            want = [
                self._model(torch.tensor([path], device=self.device), use_cache=False).logits[
                    0, -1:
                ]
                for path in paths
            ]
        expected = torch.cat(want).float()
        off = float((torch.cat(got) - expected).norm() / expected.norm())
        if not off <= _TOLERANCE.get(self.dtype, _HALF_TOLERANCE):
            raise self._unfit(
                f"with masks and a cache its logits are off by {off:.1%} from a plain pass"
            )

    def _all_logits(self, batch: TokenBatch, cache: KVCache) -> torch.Tensor:
        kept, self.head_ids = self.head_ids, None
        try:
            return self.forward(batch, cache)
        finally:
            self.head_ids = kept

    def _unfit(self, reason: str) -> ModelError:
        kind = self._config.model_type
        return ModelError(
            f"model_type: {kind!r} cannot run with engine hf: {reason}; the methods here need to "
            "roll back and to mask"
        )


def _windows(config: Any) -> int | dict[str, int | None] | None:
    """The window of all layers, or of each kind of layer where there are two kinds."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise ModelError(
            f"layer_types: {unknown[0]!r} cannot run with engine hf (supported: "
            f"{', '.join(_KINDS)})"
        )
    if not kinds:
        return window
    return {"full_attention": None, "sliding_attention": window}


class SlotKeysAndValues(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Stands in for transformers' cache during one pass: keys and values live in the slots.

    Slots that lie side by side, as those of a full batch do, are handed out without a copy.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment], end: int) -> None:
        super().__init__(layers=[])
        self._memory, self._segments, self._end = cache.memory, segments, end
        slots = [segment.slot for segment in segments]
        adjacent = slots == list(range(slots[0], slots[0] + len(slots)))
        self._slots: slice | torch.Tensor = slice(slots[0], slots[0] + len(slots))
        if not adjacent:
            self._slots = torch.tensor(slots, device=cache.memory.device)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [sequences, kv_heads, width, D] to each slot; returns all cells up to the end."""
        memory = self._memory[layer_idx]
        for i, segment in enumerate(self._segments):
            cells = slice(segment.start, segment.end)
            memory[0, segment.slot, :, cells] = key_states[i, :, : segment.count]
            memory[1, segment.slot, :, cells] = value_states[i, :, : segment.count]
        seen = memory[:, self._slots, :, : self._end]
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # as transformers calls it
        """Cells before the pass: only what positions and masks are given leaves to transformers."""
        return max(segment.start for segment in self._segments)


class _Shapes(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Notes what a model caches in each layer: (key heads, head size)."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps nothing."""
        if key_states.shape != value_states.shape:
            raise ValueError("keys and values differ in shape")
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # as transformers calls it
        """Nothing is cached."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Length and offset of the keys."""
        return query_length, 0
