"""What every model of the engine can do, whatever runs its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import TokenBatch


class LanguageModel(Protocol):
    """A decoder-only model with its weights.

    Attributes:
        head_ids: token id of each logit, int64 [logits]; None where logit i is token i. A draft
            whose head is trimmed to its most frequent tokens has fewer logits than tokens.
        device: of weights, cache, logits and their ids.
        dtype: of weights and computation.
    """

    head_ids: torch.Tensor | None
    device: torch.device
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        """Number of logits a pass returns for a token."""

    @property
    def max_position(self) -> int:
        """Most tokens of one sequence."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in its pass."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one token."""

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """Allocates the KV cache of `slots` sequences with `cells` cells each."""

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Feeds the batch, writes its keys and values, returns logits.

        Args:
            batch: N new tokens.
            cache: read behind and written at each segment's cells; its lengths are not changed.
            rows: which of the N rows need logits.

        Returns:
            float32 logits [rows, logits]; see `head_ids` for the token ids. On a GPU they may still
            be in the making.
        """

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """Feeds `tokens` to an empty slot in chunks and settles them; computes no logits."""
