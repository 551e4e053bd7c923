"""A batch as tensors of fixed shapes: what a pass that is recorded once and replayed is fed.

Every sequence has as many rows as the longest; the rows that a shorter one lacks repeat its last
token in the same cell, so that they change nothing. No number of the batch is left to Python: where
keys are written and which cells each row sees is computed from tensors, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from impl.engine.device import pinned
from impl.engine.token_batch import Segment, TokenBatch, newest

LENGTH_STEP = 64  # cells: attention kernels want masks of aligned rows
_TAIL_STEP = 16


class PaddedShape(NamedTuple):
    """What decides the shapes of a pass.

    Attributes:
        sequences: S.
        rows: n of each sequence.
        length: L, cells of a slot that attention reads.
        tail: T, width of the tail masks; 0 where all sequences are causal.
        first_slot: of sequences whose slots lie side by side; None where slots are gathered.
        exact: no row is padding.
    """

    sequences: int
    rows: int
    length: int
    tail: int
    first_slot: int | None
    exact: bool

    @classmethod
    def of(cls, segments: Sequence[Segment], *, rows: int, length: int) -> PaddedShape:
        """The shape of these segments, padded to so many rows and cells."""
        slots = [segment.slot for segment in segments]
        adjacent = slots == list(range(slots[0], slots[0] + len(slots)))
        masked = any(segment.tail_mask is not None for segment in segments)
        widest = max(segment.tail().shape[1] for segment in segments) if masked else 0
        exact = all(segment.count == rows for segment in segments)
        first_slot = slots[0] if adjacent else None
        return cls(len(slots), rows, length, round_up(widest, _TAIL_STEP), first_slot, exact)


class PaddedInputs(NamedTuple):
    """The memory that a pass reads, all of its numbers in one block.

    Attributes:
        numbers: int64, for each row its token, position and cell [3, S, n], then for each sequence
            its slot, its first new cell and where its tail mask begins [3, S].
        tails: bool [S, n, T], see `Segment.tail_mask`; its columns are padded with False.
    """

    numbers: torch.Tensor
    tails: torch.Tensor

    @classmethod
    def of(cls, batch: TokenBatch, shape: PaddedShape) -> PaddedInputs:
        """A batch on the host."""
        count, rows = shape.sequences, shape.rows
        numbers = np.empty(3 * count * (rows + 1), dtype=np.int64)
        by_row = numbers[: 3 * count * rows].reshape(3, count, rows)
        by_sequence = numbers[3 * count * rows :].reshape(3, count)
        tails = np.zeros((count, rows, shape.tail), dtype=bool)
        source = source_rows(batch.segments, rows)
        by_row[0], by_row[1] = batch.tokens.numpy()[source], batch.positions.numpy()[source]
        for i, segment in enumerate(batch.segments):
            own = np.minimum(np.arange(rows), segment.count - 1)
            by_row[2, i] = segment.start + own
            tail = segment.tail().numpy() if shape.tail else np.zeros((segment.count, 0), bool)
            tails[i, :, : tail.shape[1]] = tail[own]
            by_sequence[:, i] = segment.slot, segment.start, segment.end - tail.shape[1]
        return cls(torch.from_numpy(numbers), torch.from_numpy(tails))

    def empty_on(self, device: torch.device) -> PaddedInputs:
        """Memory of the same shapes on a device."""
        return PaddedInputs(*(torch.empty_like(part, device=device) for part in self))

    def copy_(self, host: PaddedInputs) -> None:
        """Takes a batch's numbers without waiting for them."""
        for own, other in zip(self, host, strict=True):
            if other.numel():
                own.copy_(pinned(other, own.device), non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """See the module docstring. All tensors are on the model's device.

    Attributes:
        shape: of the pass.
        tokens, positions: int64 [S * n].
        cells: int64 [S, n], where each row's keys and values go.
        slots: int64 [S].
        starts: int64 [S], the first cell that each sequence writes.
        tail_starts: int64 [S], the first cell that its tail mask is about.
        tails: bool [S, n, T].
    """

    shape: PaddedShape
    tokens: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    tail_starts: torch.Tensor
    tails: torch.Tensor
    _computed: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def over(cls, inputs: PaddedInputs, shape: PaddedShape) -> PaddedBatch:
        """The batch that the memory holds whenever a pass reads it."""
        count, rows = shape.sequences, shape.rows
        by_row, by_sequence = torch.split(inputs.numbers, [3 * count * rows, 3 * count])
        tokens, positions, cells = by_row.view(3, -1)
        slots, starts, tail_starts = by_sequence.view(3, -1)
        cells = cells.view(count, rows)
        return cls(shape, tokens, positions, cells, slots, starts, tail_starts, inputs.tails)

    def rotary(self, rope: torch.Tensor) -> torch.Tensor:
        """The tables' rows [2, S * n, head_dim]; computed once a pass, as all that follows."""
        return self._once(id(rope), lambda: rope[:, self.positions])

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor:
        """What rows see, 0 or -inf: [S, 1, n * group, L], each row as often as heads share a key.

        Args:
            window: see `Segment.visible`.
            group: query heads of a key head.
            dtype: of the result.
        """

        def compute() -> torch.Tensor:
            visible = self._visible()
            if window is not None:
                visible = newest(visible, window)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            hidden.masked_fill_(~visible, float("-inf"))
            return hidden.repeat_interleave(group, dim=1)[:, None]

        return self._once((window, group, dtype), compute)

    def _visible(self) -> torch.Tensor:
        """Bool [S, n, L]."""
        cell = torch.arange(self.shape.length, device=self.cells.device)
        if not self.shape.tail:
            return cell <= self.cells[:, :, None]
        behind = cell - self.tail_starts[:, None]  # [S, L], column of the tail mask
        inside = (behind >= 0) & (behind < self.shape.tail)
        column = behind.clamp(0, self.shape.tail - 1)[:, None].expand(-1, self.shape.rows, -1)
        return (behind < 0)[:, None] | (inside[:, None] & self.tails.gather(2, column))

    def _once(self, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def source_rows(segments: Sequence[Segment], rows: int) -> NDArray[np.int64]:
    """The row of a packed batch that each padded row [S, n] repeats."""
    counts = np.array([segment.count for segment in segments])
    first = np.cumsum(counts) - counts
    source: NDArray[np.int64] = first[:, None] + np.minimum(np.arange(rows), counts[:, None] - 1)
    return source


def real_rows(segments: Sequence[Segment], rows: int) -> list[int]:
    """Where the rows of a packed batch are among the padded ones, S * n in a line."""
    return [i * rows + j for i, segment in enumerate(segments) for j in range(segment.count)]
