"""What a run needs of whoever does its work, and what that one tells the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from harness.conditions import Conditions
from harness.config import RunConfig
from harness.errors import HarnessError
from harness.execution import Host
from harness.plan import WorkItem
from harness.preparation import Prepared
from harness.progress import Progress
from harness.verification import Verification


@dataclass(frozen=True)
class Preparation:
    """A run that can be made, and what of program and machine the manifest keeps."""

    prepared: Prepared
    identity: dict[str, Any]


class RunHost(Host, Protocol):
    """Who keeps a whole run: what is measured, and how far each group of items is."""

    def left(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Those that are still to be measured: not stored, their cells not failed."""

    def again(self, items: Sequence[WorkItem]) -> None:
        """Those that are stored are to be measured again, unless their cells have failed."""

    def abandon(self, items: Sequence[WorkItem], error: HarnessError) -> None:
        """A group cannot go on: the cells of its unfinished items fail with the reason."""

    def observed(self, conditions: Conditions) -> None:
        """Under which conditions an item was measured."""


class Launcher(Protocol):
    """Who does the work of a run."""

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """Checks and prepares a run. Raises `HarnessError` as `harness.preparation` does."""

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: RunHost
    ) -> None:
        """Measures and stores items; one group's failure leaves the others.

        Raises:
            StoreError: a run directory that cannot be written.
        """

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """Judges the outputs of a stored run."""

    def record(self, config: RunConfig) -> dict[str, Any]:
        """How items are measured, for the manifest (`workers`)."""


def groups(items: Sequence[WorkItem]) -> list[tuple[WorkItem, ...]]:
    """Items that are compared with each other, in the order of the plan.

    A group is one repeat of all methods on one dataset, temperature and batch size, with the A/A
    control.
    """
    found = groupby(items, key=lambda item: (item.repeat, item.cell.group))
    return [tuple(members) for _, members in found]


@contextmanager
def launcher(config: RunConfig, fingerprint: Mapping[str, Any] | None) -> Iterator[Launcher]:
    """The launcher that a config names; what it has started ends with the block.

    Args:
        config: the run.
        fingerprint: of the machine that the run was made on so far; None for a new run.

    Raises:
        UsageError: Ray, where it is not installed or no cluster runs.
    """
    from harness.launch.local import FreshProcesses, InProcess

    if config.launcher == "ray":
        from harness.launch.ray_cluster import connected
        from harness.launch.ray_launcher import RayLauncher

        with connected() as cluster:
            yield RayLauncher(cluster, fingerprint)
    else:
        yield FreshProcesses() if config.isolate else InProcess()
