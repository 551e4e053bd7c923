"""One run from start to end: prepare what the config names, measure, store, verify the outputs.

Knows no method by name and takes no time itself: `harness.measure` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import invariants, run_prompts, synthetic
from harness.config import RunConfig
from harness.errors import StoreError, WorkerError
from harness.execution import Failure
from harness.greedy import GreedyCheck
from harness.interrupts import termination_as_interrupt
from harness.launch.launcher import Launcher, launcher
from harness.messages import first_line
from harness.metrics import split_cells
from harness.preparation import Prepared, prepare
from harness.progress import Progress
from harness.resume import refuse_changes, stored_config
from harness.session import Session
from harness.store import RunStore, Status, finished_items, read_manifest, read_run, refuse_used
from harness.verification import (
    Verification,
    certify_outputs,
    compare_greedy,
    verifying_cores,
)

if TYPE_CHECKING:
    from harness.equivalence.certificate import Certificate
    from harness.equivalence.verify import ReferenceName

INTERRUPTED = 130  # the shell's code for a process that SIGINT ended


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        directory: the run directory.
        status: as in the manifest.
        failures: cells that ended early.
        greedy: outputs compared with the autoregressive ones; None after an interrupt or where
            the acceptance is synthetic.
        certificate: of losslessness; None after an interrupt or where the run is not verified.
        faults: invariants that the stored rows break; none in a sound program.
    """

    directory: Path
    status: Status
    failures: tuple[Failure, ...]
    greedy: GreedyCheck | None
    certificate: Certificate | None
    faults: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when every cell was measured, all rows add up and no greedy output is wrong.

        130 after an interrupt.
        """
        if self.status == "interrupted":
            return INTERRUPTED
        wrong = self.greedy is not None and any(not d.tie for d in self.greedy.divergences)
        return 1 if wrong or self.faults or self.status == "failed" else 0


def run(config: RunConfig, out: Path, progress: Progress) -> RunSummary:
    """Measures what the config names and stores it.

    Args:
        config: the run.
        out: run directory; absent or empty.
        progress: told what happens; closed at the end.

    Raises:
        UsageError: unknown method, option, pair or dataset, cores or context that are not there,
            or no draft where a method needs one.
        HarnessError: models or prompts that cannot be had, or a directory that cannot be written.
            A failing method raises nothing: it is in the summary.
    """
    refuse_used(out)  # before anything is loaded

    return _run(config, None, lambda manifest: RunStore.create(out, manifest), progress)


def resume(
    directory: Path,
    progress: Progress,
    *,
    config: RunConfig | None = None,
    places: Mapping[str, Any] | None = None,
) -> RunSummary:
    """Continues a run that was killed, interrupted or failed; no finished item is measured again.

    Args:
        directory: its run directory.
        progress: told what happens; closed at the end.
        config: what the run must have been made with; None takes its own.
        places: `data_dir`, `cache_dir` and `launcher`, where they are not the run's own.

    Raises:
        StoreError: no run directory, or one made by another config, revision, program, machine,
            from other weights or prompts; the message names what differs.
        HarnessError: as for `run`.
    """
    manifest = read_manifest(directory)
    chosen = config or stored_config(manifest, places or {})

    def reopen(now: dict[str, Any]) -> RunStore:
        refuse_changes(directory, manifest, now)
        for problem in read_run(directory).problems:
            progress.note(f"{problem}; it is measured again")
        return RunStore.open(directory)

    return _run(chosen, manifest.get("fingerprint"), reopen, progress)


def extend(directory: Path, repeats: int, progress: Progress) -> RunSummary:
    """Continues a finished run by further repeats, as if it had been made with so many.

    Args:
        directory: its run directory.
        repeats: of every cell from now on; no fewer than it has.
        progress: told what happens; closed at the end.

    Raises:
        HarnessError: as for `resume`.
    """
    manifest = read_manifest(directory)
    config = stored_config(manifest, {}).model_copy(update={"repeats": repeats})

    def reopen(now: dict[str, Any]) -> RunStore:
        longer = {"config": {**manifest["config"], "repeats": repeats}, "plan": now["plan"]}
        refuse_changes(directory, {**manifest, **longer}, now)
        store = RunStore.open(directory)
        store.update(**longer)
        return store

    return _run(config, manifest.get("fingerprint"), reopen, progress)


def verify(
    directory: Path,
    progress: Progress,
    *,
    reference: ReferenceName = "engine",
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> Certificate:
    """Certifies a stored run, on this machine's copy of its models, and stores the certificate.

    Args:
        directory: the run directory.
        progress: told what happens; closed at the end.
        reference: what outputs are scored with.
        cache_dir: where weights are kept; None is the run's own place.
        data_dir: mirror folder of prompts; None is the run's own place.

    Raises:
        StoreError: no run directory, or weights or prompts that are no longer those of the run.
    """
    from impl.engine import placement

    store = RunStore.open(directory)
    config = stored_config(store.manifest, {"cache_dir": cache_dir, "data_dir": data_dir})
    synthetic.refuse(config, "leaves nothing to verify")
    try:
        stored = run_prompts.stored_prompts(directory, store.manifest["datasets"])
        prepared = prepare(config, progress, stored)
        _check_same(store, prepared)
        run, prompts = read_run(directory), prepared.workload().prompt_ids()
        models = prepared.models()
        with placement.applied(verifying_cores(config.placement)):
            greedy = compare_greedy(run, prompts, models, progress)
            certificate = certify_outputs(run, prompts, models, greedy, progress, reference)
    finally:
        progress.close()
    with store.locked():
        store.update(**Verification(greedy, certificate).record())
    return certificate


def _run(
    config: RunConfig,
    machine: Mapping[str, Any] | None,
    open_store: Callable[[dict[str, Any]], RunStore],
    progress: Progress,
) -> RunSummary:
    """Prepares, opens the store and measures into it; `machine` is that of a resumed run."""
    with launcher(config, machine) as work, termination_as_interrupt():
        try:
            found = work.prepare(config, progress)
            prepared = found.prepared
            workers = work.record(prepared.config)
            told = {"command": list(sys.argv), "workers": workers}  # ours, not the worker's
            store = open_store({**found.identity, **told, **prepared.record})
            with store.locked():
                run_prompts.write_prompts(store.directory, prepared.prompts)
                return _measure(prepared, store, progress, work)
        finally:
            progress.close()


def _measure(prepared: Prepared, store: RunStore, progress: Progress, work: Launcher) -> RunSummary:
    left = len(prepared.record["plan"]) - len(finished_items(store.directory))
    if not left and (found := Verification.from_record(store.manifest)):
        progress.note("nothing is left to measure")
        return _summary(store, "finished", (), found)
    store.update(status="running", ended=None, failures=[])
    session = Session(prepared, store, progress, work)
    status = session.run()
    failures = tuple(session.failures.values())
    if status == "interrupted":
        return _summary(store, status, failures, None)
    if prepared.config.acceptance is not None:  # the outputs are no model's: nothing to verify
        faults = _broken_invariants(store.directory)
        return RunSummary(store.directory, status, failures, None, None, faults)
    try:
        found = work.verify(prepared, store.directory, progress)
    except WorkerError as error:  # what was measured stays
        failure = Failure("verification", type(error).__name__, first_line(error))
        failures = (*failures, failure)
        store.update(status="failed", failures=[asdict(each) for each in failures])
        return _summary(store, "failed", failures, None)
    store.update(**found.record())
    return _summary(store, status, failures, found)


def _summary(
    store: RunStore, status: Status, failures: tuple[Failure, ...], found: Verification | None
) -> RunSummary:
    if found is None:
        return RunSummary(store.directory, status, failures, None, None)
    faults = _broken_invariants(store.directory)
    return RunSummary(store.directory, status, failures, found.greedy, found.certificate, faults)


def _broken_invariants(directory: Path) -> tuple[str, ...]:
    """The invariants that the rows of a stored run break, a line each."""
    stored = read_run(directory)
    cells = split_cells(stored.requests, stored.rounds)
    return tuple(invariants.faults(stored.requests, stored.rounds, cells))


def _check_same(store: RunStore, prepared: Prepared) -> None:
    """Raises `StoreError` unless weights and prompts are those that the run was made with."""
    then, now = _sums(store.manifest), _sums(prepared.record)
    changed = [name for name in then if now.get(name) != then[name]]
    if changed:
        raise StoreError(
            f"{store.directory}: {changed[0]} is no longer what the run was made with "
            f"(sha256 {then[changed[0]]}); measure it again"
        )


def _sums(manifest: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the target's weights and of each dataset."""
    datasets = {name: found["sha256"] for name, found in manifest["datasets"].items()}
    return {"target": manifest["pair"]["target"]["sha256"], **datasets}
