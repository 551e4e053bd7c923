"""Groups of processes that `torch.distributed` connects, apart from any default group.

A process may be in several at a time, and a group ends with the processes in it. Gloo between CPUs,
NCCL between GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from impl.engine.channel import PeerGoneError

LOCALHOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)  # a pass takes milliseconds; beyond this a process hangs


def open_store(host: str = LOCALHOST) -> TCPStore:
    """Where the members of a group meet, on a free port; must outlive the group."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def find_store(port: int, host: str = LOCALHOST) -> TCPStore:
    """The store that another process has opened. Raises `PeerGoneError`."""
    with peers_needed():
        return TCPStore(host, port, timeout=TIMEOUT)


def join_group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device | str = "cpu",
    timeout: timedelta = TIMEOUT,
) -> dist.ProcessGroup:
    """Waits for the other members.

    Args:
        store: where they meet.
        rank: this process's place.
        size: how many they are.
        device: where the tensors are that this member sends and receives.
        timeout: most time for a member to come to what others wait in.

    Raises:
        PeerGoneError: one does not come.
    """
    device = torch.device(device)
    with peers_needed():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, size, timeout)
    return cast("dist.ProcessGroup", group)


@contextmanager
def peers_needed() -> Iterator[None]:
    """Turns what `torch.distributed` raises for a lost or late member into `PeerGoneError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerGoneError(str(error)) from error
