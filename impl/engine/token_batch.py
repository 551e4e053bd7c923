"""What one forward pass is fed: the new tokens of several sequences, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one sequence: `count` consecutive rows of the batch.

    Attributes:
        slot: the sequence's slot of the KV cache.
        start: first cell that is written; the keys and values go to cells [start, start + count).
        count: number of tokens.
        tail_mask: bool [count, tail], what each token sees of the last `tail` cells before
            start + count; every earlier cell is visible. None is causal.
    """

    slot: int
    start: int
    count: int
    tail_mask: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """One past the last cell written."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed tokens [N] with their rotary positions [N], in the order of the segments."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]

    @classmethod
    def pack(
        cls,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        device: torch.device,
    ) -> TokenBatch:
        """Builds the tensors from Python lists."""
        return cls(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            tuple(segments),
        )

    @classmethod
    def causal(
        cls, parts: Sequence[tuple[int, int, Sequence[int]]], device: torch.device
    ) -> TokenBatch:
        """Packs (slot, start, tokens) parts whose tokens follow each other from cell `start` on."""
        tokens = [token for _, _, part in parts for token in part]
        positions = [start + i for _, start, part in parts for i in range(len(part))]
        segments = [Segment(slot, start, len(part)) for slot, start, part in parts]
        return cls.pack(tokens, positions, segments, device)
