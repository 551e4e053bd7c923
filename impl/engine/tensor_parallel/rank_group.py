"""What the ranks of a model say to each other inside a pass: sums and gathered columns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from impl.engine.channel import PeerGoneError
from impl.engine.process_group import join_group, peers_needed


class RankGroup:
    """One rank's end of the group.

    Attributes:
        rank: which one, 0 is the leader.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int, device: torch.device | str) -> None:
        """Not connected yet; `device` is the rank's own."""
        self.rank, self.size = rank, size
        self._device = torch.device(device)
        self._group: dist.ProcessGroup | None = None

    def connect(self, store: Store) -> None:
        """Meets the other ranks. Raises `PeerGoneError` when one does not come."""
        self._group = join_group(store, self.rank, self.size, self._device)

    def disconnect(self) -> None:
        """Leaves; what is still under way on a GPU is given up."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = None

    def sum_(self, summand: torch.Tensor) -> torch.Tensor:
        """Adds up every rank's tensor, in place on each. Raises `PeerGoneError`."""
        with peers_needed():
            self._connected.allreduce([summand]).wait()
        return summand

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """The leader gets [n, size * columns] of every rank's [n, columns], others their own.

        Raises:
            PeerGoneError: a rank is gone, or has not come in time.
        """
        leader = self.rank == 0
        parts = [[torch.empty_like(part) for _ in range(self.size)]] if leader else []
        with peers_needed():
            self._connected.gather(parts, [part], dist.GatherOptions()).wait()
        return torch.cat(parts[0], dim=1) if leader else part

    @property
    def _connected(self) -> dist.ProcessGroup:
        if self._group is None:
            raise PeerGoneError("the ranks have not met")
        return self._group
