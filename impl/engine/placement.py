"""Which cores a process runs on. On a CPU a device is a set of cores, one thread each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from harness.errors import UsageError


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


def apply(cores: Sequence[int]) -> None:
    """Pins the calling process to `cores` with one thread each (threads only, without affinity).

    PyTorch and the CPU kernels take as many threads from here on. Threads that they have started
    before stay where they were.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


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
