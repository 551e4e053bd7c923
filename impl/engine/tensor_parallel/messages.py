"""What the leader tells the other ranks: its own calls of the model, to be made beside it.

Nothing is answered; the ranks meet in the sums of the pass.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from impl.engine.token_batch import Segment, TokenBatch


class Move(NamedTuple):
    """`KVCache.gather` of these cells behind the trunk that ends at `start`."""

    slot: int
    start: int
    cells: tuple[int, ...]


class CacheState(NamedTuple):
    """Which cache a call is about, and what the leader did to it since the last one.

    Attributes:
        number: unique in its model.
        slots, cells: its size.
        moves: in order.
        dropped: numbers of caches that nobody uses any more.
    """

    number: int
    slots: int
    cells: int
    moves: tuple[Move, ...]
    dropped: tuple[int, ...]


class Part(NamedTuple):
    """A `Segment` in plain numbers."""

    slot: int
    start: int
    size: int
    tail_mask: NDArray[np.bool_] | None


class Forward(NamedTuple):
    """`LanguageModel.forward`; `rows` is the slice or the indices of the rows with logits."""

    cache: CacheState
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    parts: tuple[Part, ...]
    rows: slice | tuple[int, ...]

    @classmethod
    def of(cls, cache: CacheState, batch: TokenBatch, rows: torch.Tensor | slice) -> Self:
        """In plain numbers; a tensor sent between processes would take shared memory."""
        parts = tuple(
            Part(s.slot, s.start, s.count, None if s.tail_mask is None else s.tail_mask.numpy())
            for s in batch.segments
        )
        tokens, positions = tuple(batch.tokens.tolist()), tuple(batch.positions.tolist())
        wanted = rows if isinstance(rows, slice) else tuple(rows.tolist())
        return cls(cache, tokens, positions, parts, wanted)

    def batch(self) -> TokenBatch:
        """The leader's batch."""
        segments = [Segment(p.slot, p.start, p.size, _tensor(p.tail_mask)) for p in self.parts]
        return TokenBatch.pack(self.tokens, self.positions, segments)


class PrefillSlot(NamedTuple):
    """`LanguageModel.prefill`."""

    cache: CacheState
    slot: int
    tokens: tuple[int, ...]


def _tensor(mask: NDArray[np.bool_] | None) -> torch.Tensor | None:
    return None if mask is None else torch.from_numpy(mask)
