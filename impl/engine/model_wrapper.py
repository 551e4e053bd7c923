"""A model around another one, for those that change what a pass takes or what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.token_batch import TokenBatch


class ModelWrapper:
    """Says and does everything as the model within; see `LanguageModel`."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.head_ids = model.head_ids
        self.device = model.device
        self.dtype = model.dtype

    @property
    def vocabulary(self) -> int:
        """See `LanguageModel`."""
        return self.model.vocabulary

    @property
    def max_position(self) -> int:
        """See `LanguageModel`."""
        return self.model.max_position

    @property
    def batch_invariant(self) -> bool:
        """See `LanguageModel`."""
        return self.model.batch_invariant

    @property
    def weight_bytes(self) -> int:
        """See `LanguageModel`."""
        return self.model.weight_bytes

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """See `LanguageModel`."""
        return self.model.new_cache(slots, cells)

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel`."""
        return self.model.forward(batch, cache, rows)

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel`."""
        self.model.prefill(cache, slot, tokens)
