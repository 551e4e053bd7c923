"""Keys and values of the tokens seen so far: static memory, one slot a sequence.

A slot's cells are written in order by the forward pass. The first `length` cells are the trunk,
the tokens that are settled; whatever lies behind them (drafted tokens, tree branches) is scratch
that the next pass overwrites. Rolling back is therefore setting a number. Rotary positions are
baked into the keys when they are written, so a cell may be moved within its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from impl.engine.device import upload


class KVCache:
    """Memory [layers, 2, slots, kv_heads, cells, head_dim]; axis 1 is keys, then values."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        cells: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, 2, slots, kv_heads, cells, head_dim)
        self.memory = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * slots

    @property
    def cells(self) -> int:
        """Cells of one slot: settled tokens plus scratch."""
        return self.memory.shape[4]

    @property
    def bytes(self) -> int:
        """Size of the memory, which never grows."""
        return self.memory.numel() * self.memory.element_size()

    def truncate(self, slot: int, length: int) -> None:
        """Rolls the slot's trunk back, or forward over cells just written, in O(1)."""
        if not 0 <= length <= self.cells:
            raise ValueError(f"length: {length} is outside the slot's {self.cells} cells")
        self.lengths[slot] = length

    def gather(self, slot: int, cells: Sequence[int]) -> None:
        """Settles a branch: copies `cells` of the scratch, in this order, behind the trunk."""
        start, end = self.lengths[slot], self.lengths[slot] + len(cells)
        if list(cells) != list(range(start, end)):
            index = upload(torch.tensor(cells), self.memory.device)
            self.memory[:, :, slot, :, start:end] = self.memory[:, :, slot].index_select(3, index)
        self.truncate(slot, end)
