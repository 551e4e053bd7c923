"""Several runs of one plan on one machine, taken together: speedups that hold beyond one run.

An interval over the prompts of one run does not know that the next run may differ. The formula that
does is in `harness.statistics.speedup_over_runs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from harness.checks import Status, run_checks
from harness.errors import UsageError
from harness.labels import label
from harness.plan import Cell
from harness.run_differences import (
    ComparedRun,
    machine_differences,
    plan_differences,
    software_differences,
)
from harness.speedup import common_costs
from harness.statistics import FEWEST_RUNS, PairedCosts, RunsEstimate, speedup_over_runs
from harness.summary import baselines_of, placement_convention

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import RunData

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RepeatedSpeedup:
    """A method over a baseline in every run.

    Attributes:
        method: of the cells; `METHOD@control` for the A/A control.
        baseline: the method that it is compared with.
        datasets: of the cells; with several, each counts alike.
        temperature, batch_size: of the cells.
        speedup: over the runs, with its interval.
    """

    method: str
    baseline: str
    datasets: tuple[str, ...]
    temperature: float
    batch_size: int
    speedup: RunsEstimate


@dataclass(frozen=True, slots=True)
class RepeatedRuns:
    """What several runs of one plan say together.

    Attributes:
        runs: how they are called, in the order of `RunsEstimate.runs`.
        placement: the convention by which synchronous methods have their cores.
        label: what of the runs is not real (`harness.labels`).
        speedups: dataset by dataset, then over all datasets where there are several.
        warnings: what makes them weaker than they look, a line each.
    """

    runs: tuple[str, ...]
    placement: str
    label: str | None
    speedups: tuple[RepeatedSpeedup, ...]
    warnings: tuple[str, ...]


def repeated_runs(runs: Mapping[str, RunData]) -> RepeatedRuns:
    """Takes runs together that measured the same cells in the same way on the same machine.

    A cell that is degraded in one of the runs is left out of all. Only prompts that every run has
    finished count.

    Args:
        runs: two or more, by what they are called.

    Raises:
        UsageError: runs that differ in machine, settings, options, weights or prompts, all named;
            or a run that is there twice.
        StoreError: a run whose rows do not add up.
    """
    compared = [ComparedRun.of(name, run) for name, run in runs.items()]
    _refuse_unlike(compared)
    _refuse_copies(runs)
    degraded = dict(_degraded(compared))
    cells = [cell for cell in compared[0].cells if cell.id not in degraded]
    return RepeatedRuns(
        tuple(runs),
        placement_convention(compared[0].manifest),
        label(compared[0].manifest),
        tuple(_speedups(cells, compared)),
        (*_warnings(runs, compared), *degraded.values()),
    )


def _refuse_unlike(runs: Sequence[ComparedRun]) -> None:
    first = runs[0]
    for other in runs[1:]:
        machines = [f"machine {line}" for line in machine_differences(first, other)]
        if found := [*machines, *plan_differences(first, other)]:
            raise UsageError(
                f"{first.name} and {other.name} are not runs of one plan on one machine: "
                f"{'; '.join(found)}"
            )


def _refuse_copies(runs: Mapping[str, RunData]) -> None:
    """The same measurements twice would show runs that do not differ."""
    for (name, run), (other_name, other) in combinations(runs.items(), 2):
        times, others = (each.rounds[["item", "start_ns", "end_ns"]] for each in (run, other))
        if len(times) and times.equals(others):
            raise UsageError(f"{name} and {other_name} hold the same measurements")


def _degraded(runs: Iterable[ComparedRun]) -> Iterator[tuple[str, str]]:
    """The ids of degraded cells, each with a line about it."""
    for run in runs:
        for cell, decoder in run.manifest.get("decoders", {}).items():
            if reason := decoder.get("diagnostics", {}).get("degraded"):
                yield cell, f"{cell} is degraded in {run.name}, no speedup of it is told: {reason}"


def _speedups(cells: Sequence[Cell], runs: Sequence[ComparedRun]) -> Iterator[RepeatedSpeedup]:
    found: dict[tuple[str, str, float, int], dict[str, PairedCosts]] = {}
    for cell in cells:
        for baseline in (other for other in baselines_of(cell) if other in cells):
            costs = _paired_costs(cell, baseline, runs)
            if costs.method_time.size:
                key = cell.label, baseline.method, cell.temperature, cell.batch_size
                found.setdefault(key, {})[cell.dataset] = costs
                yield _speedup(key, {cell.dataset: costs})
    for key, datasets in found.items():
        if len(datasets) > 1:
            yield _speedup(key, datasets)


def _speedup(
    key: tuple[str, str, float, int], datasets: Mapping[str, PairedCosts]
) -> RepeatedSpeedup:
    method, baseline, temperature, batch_size = key
    estimate = speedup_over_runs(list(datasets.values()))
    return RepeatedSpeedup(method, baseline, tuple(datasets), temperature, batch_size, estimate)


def _paired_costs(cell: Cell, baseline: Cell, runs: Sequence[ComparedRun]) -> PairedCosts:
    """Of the prompts that both cells finished in every run."""
    import numpy as np

    costs = [common_costs(run.cells[cell], run.cells[baseline]) for run in runs]
    prompts = costs[0][0].index
    for ours, _ in costs[1:]:
        prompts = prompts.intersection(ours.index)

    def stacked(tables: Iterable[pd.DataFrame], column: str) -> np.ndarray:
        return np.array([table.loc[prompts, column].to_numpy(np.float64) for table in tables])

    methods, baselines = zip(*costs, strict=True)
    return PairedCosts(
        baseline_time=stacked(baselines, "share_ns"),
        baseline_tokens=stacked(baselines, "tokens"),
        method_time=stacked(methods, "share_ns"),
        method_tokens=stacked(methods, "tokens"),
    )


def _warnings(runs: Mapping[str, RunData], compared: Sequence[ComparedRun]) -> Iterator[str]:
    if len(runs) < FEWEST_RUNS:
        yield (
            f"{len(runs)} runs do not say how much runs differ, so there are no intervals; "
            f"make {FEWEST_RUNS} or more"
        )
    for other in compared[1:]:
        for line in software_differences(compared[0], other):
            yield f"{compared[0].name} and {other.name} differ in {line}"
    for (name, run), own in zip(runs.items(), compared, strict=True):
        if (status := run.manifest["status"]) != "finished":
            yield f"{name} is {status}: only what every run measured is in the figures"
        for check in run_checks(run, tuple(own.cells.values())):
            if check.status is Status.FAIL:
                yield f"{name}: {check.name} failed: {check.detail}"
