"""Two runs side by side, cell by cell: is the newer one slower, by how much, and why?

A regression is a cell whose speed, newer over older, has an interval wholly below 1 - gate. The
gate is the tolerance asked for, or the noise that the runs' own A/A controls show where that is
wider: a difference that autoregressive decoding shows against itself is no regression.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from harness import statistics
from harness.errors import UsageError
from harness.factors import Factors, factors
from harness.labels import label
from harness.metrics import CellData
from harness.plan import Cell
from harness.run_differences import (
    ComparedRun,
    and_more,
    machine_differences,
    run_differences,
    same_prompts,
)
from harness.speedup import common_costs, prompt_costs, speedup
from harness.statistics import Estimate

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import RunData

DEFAULT_TOLERANCE = 0.05
ALPHA = 0.05  # of all cells' tests together


class Verdict(StrEnum):
    """What a comparison of one cell says."""

    REGRESSION = "regression"  # slower by more than the gate, whole interval
    SLOWER = "slower"  # significantly, but not shown to be by more than the gate
    FASTER = "faster"
    SAME = "no difference"
    UNDECIDED = "undecided"  # fewer than two prompts: no interval


@dataclass(frozen=True, slots=True)
class CellComparison:
    """One cell in both runs.

    Attributes:
        cell: which.
        speed: tokens per second of the newer run over the older one's, with its interval.
        paired: whether it is over the same prompts.
        p_value: Wilcoxon's signed-rank test where paired, else Mann-Whitney's; this cell alone.
        adjusted: after Holm's correction over all cells.
        noise: of the A/A controls of both runs; None where neither has one.
        gate: share of the speed that the cell may lose.
        factors: what the change is made of.
        verdict: the outcome.
    """

    cell: Cell
    speed: Estimate
    paired: bool
    p_value: float | None
    adjusted: float | None
    noise: float | None
    gate: float
    factors: Factors | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        base, new: how the runs are called.
        tolerance: share of the speed that a cell may lose, as asked for.
        cells: those in both runs.
        differences: what the runs do not have in common, a line each.
        warnings: what makes the comparison weaker than it looks, a line each.
    """

    base: str
    new: str
    tolerance: float
    cells: tuple[CellComparison, ...]
    differences: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def regressions(self) -> tuple[CellComparison, ...]:
        return tuple(cell for cell in self.cells if cell.verdict is Verdict.REGRESSION)


def compare_runs(
    base: RunData,
    new: RunData,
    names: tuple[str, str] = ("BASE", "NEW"),
    tolerance: float = DEFAULT_TOLERANCE,
    *,
    allow_different_machines: bool = False,
) -> Comparison:
    """Compares every cell that both runs measured; A/A controls tell the noise instead.

    Args:
        base: the older run.
        new: the newer one.
        names: of the two, for messages.
        tolerance: share of its speed that a cell may lose.
        allow_different_machines: compare all the same, with a warning.

    Raises:
        UsageError: unlike machines or labels (`harness.labels`), or no cell in common.
        StoreError: a run whose rows do not add up.
    """
    older, newer = ComparedRun.of(names[0], base), ComparedRun.of(names[1], new)
    _refuse_unlike_labels(older, newer)
    machines = machine_differences(older, newer)
    if machines and not allow_different_machines:
        raise UsageError(
            f"{names[0]} and {names[1]} were made on unlike machines ({machines[0]}"
            f"{and_more(machines)}); --allow-different-machines compares them all the same"
        )
    common = [cell for cell in older.cells if cell in newer.cells and not cell.control]
    if not common:
        raise UsageError(f"{names[0]} and {names[1]} have no cell in common")
    compared = [_compare(cell, older, newer, tolerance) for cell in common]
    return Comparison(
        *names,
        tolerance,
        tuple(_judged(_corrected(compared))),
        tuple(run_differences(older, newer)),
        tuple(_warnings(compared, older, newer, machines, tolerance)),
    )


def _refuse_unlike_labels(base: ComparedRun, new: ComparedRun) -> None:
    """What is emulated or synthetic is comparable with its like alone, whatever is allowed."""
    labels = [label(run.manifest) for run in (base, new)]
    if labels[0] != labels[1]:
        told = [found or "all real" for found in labels]
        raise UsageError(
            f"{base.name} is {told[0]}, {new.name} is {told[1]}: their figures do not compare"
        )


def _compare(cell: Cell, base: ComparedRun, new: ComparedRun, tolerance: float) -> CellComparison:
    older, newer = base.cells[cell], new.cells[cell]
    noise = _noise(cell.group, base, new)
    compared = _paired(older, newer) if same_prompts(base, new, cell.dataset) else None
    paired = compared is not None
    speed, p_value = compared or _unpaired(older, newer)
    return CellComparison(
        cell=cell,
        speed=speed,
        paired=paired,
        p_value=p_value,
        adjusted=None,
        noise=noise,
        gate=max(tolerance, noise or 0.0),
        factors=factors(older, newer),
        verdict=Verdict.UNDECIDED,
    )


def _paired(base: CellData, new: CellData) -> tuple[Estimate, float | None] | None:
    """Over the prompts that both decoded; None where these are fewer than two."""
    ours, theirs = common_costs(new, base)
    if len(ours) < 2:
        return None
    return speedup(new, base), statistics.paired_test(_rates(theirs), _rates(ours))


def _unpaired(base: CellData, new: CellData) -> tuple[Estimate, float | None]:
    ours, theirs = prompt_costs(new), prompt_costs(base)
    speed = statistics.unpaired_speedup(
        theirs["share_ns"], theirs["tokens"], ours["share_ns"], ours["tokens"]
    )
    if speed.low is None:
        return speed, None
    return speed, statistics.unpaired_test(_rates(theirs), _rates(ours))


def _rates(costs: pd.DataFrame) -> pd.Series[float]:
    """Time per token of each prompt."""
    return costs["share_ns"] / costs["tokens"]


def _noise(group: Cell, *runs: ComparedRun) -> float | None:
    """How far from 1 the A/A intervals of a group reach, the farther of the runs."""
    reaches = [reach for run in runs if (reach := _reach(group, run)) is not None]
    return max(reaches, default=None)


def _reach(group: Cell, run: ComparedRun) -> float | None:
    baseline, control = run.cells.get(group), run.cells.get(replace(group, control=True))
    if baseline is None or control is None:
        return None
    found = speedup(control, baseline)
    if found.low is None or found.high is None:
        return None
    return max(abs(1 - found.low), abs(found.high - 1))


def _corrected(compared: Sequence[CellComparison]) -> Iterable[CellComparison]:
    from harness.equivalence.hypothesis import holm

    adjusted = iter(holm([cell.p_value for cell in compared if cell.p_value is not None]))
    for cell in compared:
        yield cell if cell.p_value is None else replace(cell, adjusted=float(next(adjusted)))


def _judged(compared: Iterable[CellComparison]) -> Iterable[CellComparison]:
    for cell in compared:
        yield replace(cell, verdict=_verdict(cell))


def _verdict(cell: CellComparison) -> Verdict:
    value, high = cell.speed.value, cell.speed.high
    if value is None or high is None:
        return Verdict.UNDECIDED
    if high < 1 - cell.gate:
        return Verdict.REGRESSION
    if cell.adjusted is None or cell.adjusted > ALPHA:
        return Verdict.SAME
    return Verdict.SLOWER if value < 1 else Verdict.FASTER


def _warnings(
    compared: Sequence[CellComparison],
    base: ComparedRun,
    new: ComparedRun,
    machines: Sequence[str],
    tolerance: float,
) -> Iterable[str]:
    if unreal := label(new.manifest):
        yield f"both runs are {unreal}"
    if machines:
        yield f"the machines differ, so do speeds: {machines[0]}{and_more(machines)}"
    for run in (base, new):
        status = run.manifest.get("status")
        if status != "finished":
            yield f"{run.name} is {status}: only what it measured is compared"
    yield from _noise_warnings(compared, base, new, tolerance)
    for run in (base, new):
        for cell in compared:
            decoder = run.manifest.get("decoders", {}).get(cell.cell.id, {})
            if reason := decoder.get("diagnostics", {}).get("degraded"):
                yield f"{cell.cell.id} is degraded in {run.name}: {reason}"
    for cell in compared:
        if cell.speed.low is None:
            yield f"{cell.cell.id}: {cell.speed.n} prompts, too few to compare"


def _noise_warnings(
    compared: Sequence[CellComparison], base: ComparedRun, new: ComparedRun, tolerance: float
) -> Iterable[str]:
    """A line for each group of cells whose noise is unknown or wider than the tolerance."""
    for group, noise in {cell.cell.group: cell.noise for cell in compared}.items():
        where = f"{group.dataset}, temperature {group.temperature:g}, batch size {group.batch_size}"
        for run in (base, new):
            if _reach(group, run) is None:
                yield (
                    f"{where}: no A/A control in {run.name}, its noise is unknown and a gate of "
                    f"{tolerance:.1%} may be tighter than it"
                )
        if noise is not None and noise > tolerance:
            yield (
                f"{where}: AR differs from itself by up to {noise:.1%}, so the gate is {noise:.1%} "
                f"there, not {tolerance:.1%}"
            )
