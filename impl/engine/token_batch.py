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

    def tail(self, window: int | None = None) -> torch.Tensor:
        """The tail mask, spelt out where causal; see `visible` for the window."""
        mask = self.tail_mask
        if mask is None:
            mask = torch.ones(self.count, self.count, dtype=torch.bool).tril()
        return mask if window is None else newest(mask, window)

    def visible(self, window: int | None = None) -> torch.Tensor:
        """What each token sees: bool [count, end].

        Args:
            window: how many tokens a token sees at most, itself included. The cells that a token
                sees hold one token of each position up to its own, in order, be it in a tree: so
                the window is the last `window` of them.
        """
        tail = self.tail()
        trunk = torch.ones(self.count, self.end - tail.shape[1], dtype=torch.bool)
        mask = torch.cat((trunk, tail), dim=1)
        return mask if window is None else newest(mask, window)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed tokens [N] with their rotary positions [N], in the order of the segments.

    They are made on the host; a model moves them to where it runs.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]

    @classmethod
    def pack(
        cls,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
    ) -> TokenBatch:
        """Builds the tensors from Python lists."""
        return cls(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            tuple(segments),
        )

    @classmethod
    def causal(cls, parts: Sequence[tuple[int, int, Sequence[int]]]) -> TokenBatch:
        """Packs (slot, start, tokens) parts whose tokens follow each other from cell `start` on."""
        tokens = [token for _, _, part in parts for token in part]
        positions = [start + i for _, start, part in parts for i in range(len(part))]
        segments = [Segment(slot, start, len(part)) for slot, start, part in parts]
        return cls.pack(tokens, positions, segments)


def newest(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Keeps the last `window` cells that each row of a mask [..., cells] sees."""
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) <= window)
