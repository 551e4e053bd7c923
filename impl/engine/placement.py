"""Which cores a process runs on. On a CPU a device is a set of cores, one thread each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from harness.errors import PlacementError, UsageError


def available_cores() -> tuple[int, ...]:
    """The cores of this machine that this process may use at all."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return ()


def check(field: str, cores: Sequence[int]) -> None:
    """Refuses cores that the machine lacks; `field` names the option in the message."""
    present = available_cores()
    missing = [core for core in cores if present and core not in present]
    if not cores or missing:
        raise UsageError(f"{field}: {list(missing or cores)} not on this machine, which has cores "
                         f"{', '.join(map(str, present))}")  # fmt: skip


def check_devices(field: str, devices: Sequence[str]) -> None:
    """Refuses GPUs that the machine lacks; `field` names the option in the message."""
    count = torch.cuda.device_count()
    missing = [name for name in devices if name != "cpu" and torch.device(name).index >= count]
    if missing:
        present = f"cuda:0-{count - 1}" if count > 1 else "cuda:0" if count else "no GPU"
        raise UsageError(f"{field}: {', '.join(missing)} not on this machine, which has {present}")


def apply(cores: Sequence[int]) -> None:
    """Pins the calling process to `cores` with one thread each (threads only, without affinity).

    PyTorch and the CPU kernels take as many threads from here on. Threads that they have started
    before stay where they were.

    Raises:
        PlacementError: the system gives other cores (a container's set, say), or PyTorch other
            threads.
    """
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise PlacementError(f"this process may not run on cores {_list(cores)}") from error
    torch.set_num_threads(len(cores))
    check_applied(cores)


def check_applied(cores: Sequence[int]) -> None:
    """Raises `PlacementError` unless the calling process is where `apply` put it."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cores)
    if own != set(cores):
        raise PlacementError(
            f"this process should run on cores {_list(cores)} and runs on {_list(sorted(own))}"
        )
    threads = torch.get_num_threads()
    if threads != len(cores):
        raise PlacementError(f"PyTorch should have {len(cores)} threads and has {threads}")


@contextmanager
def applied(cores: Sequence[int]) -> Iterator[None]:
    """`apply` for the length of a block; cores and threads are as before behind it."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    threads = torch.get_num_threads()
    apply(cores)
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _list(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))
