"""Cores and threads are as they were set, or say so."""

import os
from collections.abc import Iterator

import pytest
import torch

from harness.errors import PlacementError
from impl.engine import placement

CORE = min(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def test_a_process_is_where_it_was_put() -> None:
    placement.apply((CORE,))
    assert os.sched_getaffinity(0) == {CORE}
    assert torch.get_num_threads() == 1
    placement.check_applied((CORE,))


def test_threads_that_have_changed_are_told() -> None:
    placement.apply((CORE,))
    torch.set_num_threads(3)
    with pytest.raises(PlacementError, match="should have 1 threads and has 3"):
        placement.check_applied((CORE,))


def test_cores_that_have_changed_are_told() -> None:
    placement.apply((CORE,))
    with pytest.raises(PlacementError, match=f"on cores 7, 9 and runs on {CORE}"):
        placement.check_applied((7, 9))


def test_cores_that_a_container_withholds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel leaves out, without a word, what is not in the container's set."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, _cores: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4})
    with pytest.raises(PlacementError, match="should run on cores 4, 5 and runs on 4"):
        placement.apply((4, 5))


def test_cores_that_are_refused_are_told() -> None:
    with pytest.raises(PlacementError, match="may not run on cores 4000"):
        placement.apply((4000,))
