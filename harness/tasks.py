"""The three tasks of a run, done in a fresh process each or in this one, by the same functions.

Fresh processes are the rule: what an earlier group of cells left behind (memory, threads, caches)
cannot reach the next, and the process that keeps the results stays small and idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from harness import preparation
from harness.config import RunConfig
from harness.errors import StoreError
from harness.execution import Host, execute
from harness.measure import GARBAGE_COLLECTION
from harness.plan import WorkItem
from harness.preparation import Prepared, from_json, to_json
from harness.progress import Progress
from harness.supervisor import call_worker, pinned_environment
from harness.tuning.usage import tuned_methods
from harness.verification import Verification, verify_outputs, verifying_cores


@dataclass(frozen=True)
class Preparation:
    """A run that can be made, and what of program and machine the manifest keeps."""

    prepared: Prepared
    identity: dict[str, Any]


class Tasks(Protocol):
    """Who does the work of a run."""

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """Checks and prepares a run. Raises `HarnessError` as `harness.preparation` does."""

    def batches(self, items: Sequence[WorkItem]) -> Iterable[Sequence[WorkItem]]:
        """What one call of `measure` takes, in the order of the plan."""

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: Host
    ) -> None:
        """Measures and stores items. Raises `HarnessError` when it could not go on."""

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """Judges the outputs of a stored run."""

    def record(self, config: RunConfig) -> dict[str, Any]:
        """How items are measured, for the manifest (`workers`)."""


class InProcess:
    """In this process: quick to start, for tests and for runs whose speed does not matter."""

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """See `Tasks`."""
        preparation.check_methods(config)
        prepared = preparation.prepare(config, progress)
        identity = preparation.identity(prepared.config)
        tuned = tuned_methods(prepared, {**identity, **prepared.record})
        for line in tuned.unused:
            progress.note(f"not tuned: {line}")
        return Preparation(prepared, {**identity, "tuning": tuned.to_json()})

    def batches(self, items: Sequence[WorkItem]) -> Iterable[Sequence[WorkItem]]:
        """See `Tasks`."""
        return [items]

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: Host
    ) -> None:
        """See `Tasks`."""
        execute(prepared, items, directory, host)

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """See `Tasks`."""
        from impl.engine import placement

        with placement.applied(verifying_cores(prepared.config.placement)):
            return verify_outputs(directory, prepared, prepared.models(), progress)

    def record(self, config: RunConfig) -> dict[str, Any]:  # noqa: ARG002 - as `Tasks` says
        """See `Tasks`."""
        return {
            "isolated": False,
            "environment": {},
            "garbage_collection": GARBAGE_COLLECTION,
        }


class FreshProcesses:
    """A process for the preparation, one for each repeat of a group of cells, one to verify.

    A group is all methods on one dataset, temperature and batch size, with the A/A control: they
    take turns in one process that loads the target once. No two processes run at a time.
    """

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """See `Tasks`."""
        order = {"task": "prepare", "config": config.model_dump(mode="json", exclude_unset=True)}
        found = call_worker(order, progress, threads=None, timeout_s=config.worker_timeout_s)
        return Preparation(from_json(found["prepared"]), found["identity"])

    def batches(self, items: Sequence[WorkItem]) -> Iterable[Sequence[WorkItem]]:
        """See `Tasks`."""
        groups = groupby(items, key=lambda item: (item.repeat, item.cell.group))
        return [tuple(members) for _, members in groups]

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: Host
    ) -> None:
        """See `Tasks`."""
        order = {
            "task": "measure",
            "prepared": to_json(prepared),
            "items": [item.id for item in items],
            "directory": str(directory.resolve()),
        }
        timeout_s = prepared.config.worker_timeout_s
        call_worker(order, host, threads=_threads(prepared.config), timeout_s=timeout_s)

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """See `Tasks`."""
        order = {
            "task": "verify",
            "prepared": to_json(prepared),
            "directory": str(directory.resolve()),
        }
        threads = len(verifying_cores(prepared.config.placement))
        timeout_s = prepared.config.worker_timeout_s
        record = call_worker(order, progress, threads=threads, timeout_s=timeout_s)
        found = Verification.from_record({**record, "config": {"verify": prepared.config.verify}})
        if found is None:
            raise StoreError(f"{directory}: the certificate cannot be read back")
        return found

    def record(self, config: RunConfig) -> dict[str, Any]:
        """See `Tasks`."""
        return {
            "isolated": True,
            "environment": pinned_environment(_threads(config)),
            "garbage_collection": GARBAGE_COLLECTION,
        }


def _threads(config: RunConfig) -> int:
    return len(config.placement.rank_cores(0))
