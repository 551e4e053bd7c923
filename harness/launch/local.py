"""The three tasks of a run on this machine: in a fresh process each, or in this one.

Fresh processes are the rule: what an earlier group of cells left behind (memory, threads, caches)
cannot reach the next, and the process that keeps the results stays small and idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import preparation
from harness.conditions import watch
from harness.config import RunConfig
from harness.errors import HarnessError, StoreError
from harness.execution import Host, execute
from harness.launch.launcher import Preparation, RunHost, groups
from harness.launch.orders import (
    measure_order,
    preparation_of,
    prepare_order,
    verification_of,
    verifier_threads,
    verify_order,
    worker_threads,
)
from harness.launch.watched import watched
from harness.measure import GARBAGE_COLLECTION
from harness.plan import WorkItem
from harness.preparation import Prepared
from harness.progress import Progress
from harness.store import read_manifest
from harness.supervisor import call_worker, pinned_environment
from harness.tuning.usage import tuned_methods
from harness.verification import Verification, verify_outputs, verifying_cores


class InProcess:
    """In this process: quick to start, for tests and for runs whose speed does not matter."""

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """See `Launcher`."""
        preparation.check_methods(config)
        preparation.check_machine(config)
        prepared = preparation.prepare(config, progress)
        identity = preparation.identity(prepared.config)
        tuned = tuned_methods(prepared, {**identity, **prepared.record})
        for line in tuned.unused:
            progress.note(f"not tuned: {line}")
        return Preparation(prepared, {**identity, "tuning": tuned.to_json()})

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: RunHost
    ) -> None:
        """See `Launcher`."""

        def work(members: Sequence[WorkItem], own: Host) -> None:
            execute(prepared, members, directory, own)

        _one_by_one([items], prepared, directory, host, work)

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """See `Launcher`."""
        from impl.engine import placement

        with placement.applied(verifying_cores(prepared.config.placement)):
            return verify_outputs(directory, prepared, prepared.models(), progress)

    def record(self, config: RunConfig) -> dict[str, Any]:  # noqa: ARG002 - as `Launcher` says
        """See `Launcher`."""
        return {
            "isolated": False,
            "environment": {},
            "garbage_collection": GARBAGE_COLLECTION,
        }


class FreshProcesses:
    """A process for the preparation, one for each repeat of a group of cells, one to verify.

    The members of a group take turns in one process that loads the target once. No two processes
    run at a time.
    """

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """See `Launcher`."""
        timeout_s = config.worker_timeout_s
        found = call_worker(prepare_order(config), progress, threads=None, timeout_s=timeout_s)
        return preparation_of(found)

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: RunHost
    ) -> None:
        """See `Launcher`."""
        threads = worker_threads(prepared.config)
        timeout_s = prepared.config.worker_timeout_s

        def work(members: Sequence[WorkItem], own: Host) -> None:
            order = measure_order(prepared, members, directory)
            call_worker(order, own, threads=threads, timeout_s=timeout_s)

        _one_by_one(groups(items), prepared, directory, host, work)

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """See `Launcher`."""
        found = call_worker(
            verify_order(prepared, directory),
            progress,
            threads=verifier_threads(prepared.config),
            timeout_s=prepared.config.worker_timeout_s,
        )
        return verification_of(found, prepared.config, directory)

    def record(self, config: RunConfig) -> dict[str, Any]:
        """See `Launcher`."""
        return {
            "isolated": True,
            "environment": pinned_environment(worker_threads(config)),
            "garbage_collection": GARBAGE_COLLECTION,
        }


def _one_by_one(
    batches: Sequence[Sequence[WorkItem]],
    prepared: Prepared,
    directory: Path,
    host: RunHost,
    work: Callable[[Sequence[WorkItem], Host], None],
) -> None:
    """Measures batches in their order, this machine's counters read around every item."""
    fingerprint = read_manifest(directory).get("fingerprint", {})
    own = watched(host, watch(prepared.config.placement, fingerprint))
    for batch in batches:
        items = host.left(batch)
        try:
            if items:
                work(items, own)
        except StoreError:
            raise
        except HarnessError as error:
            host.abandon(items, error)
