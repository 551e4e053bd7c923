"""Shared by the speed tests: one pinned core, interleaved timing, and a table of what was compared.

Ratios only mean something when both sides were timed in turns on an otherwise idle machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import pytest
import torch

from harness.cache import default_cache_dir

TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = []


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if rows := config.stash[TABLE]:
        terminalreporter.section("speed, quickest of the interleaved rounds")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the table at the end."""
    return request.config.stash[TABLE].append


@pytest.fixture(scope="session")
def cache_dir():
    return default_cache_dir()


@pytest.fixture(autouse=True)
def one_core():
    """Runs the test on one core with one thread, and gives the cores back; gives all of them."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    yield cores
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.fixture
def interleaved(benchmark):
    """Times several functions in turns; returns each one's quickest seconds.

    pytest-benchmark records the whole turn; the parts go to its `extra_info`.
    """

    def measure(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        seconds: dict[str, list[float]] = {name: [] for name in functions}

        def turn() -> None:
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)

        benchmark.pedantic(turn, rounds=rounds, warmup_rounds=1)
        best = {name: min(times[1:]) for name, times in seconds.items()}
        benchmark.extra_info.update(best)
        return best

    return measure
