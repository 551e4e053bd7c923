"""What must hold in every run: no method changes the distribution, A/A holds 1, rows add up.

Each check is recomputed from the run directory whenever the run is shown. Only what needs the
models was computed when the run ended: the gaps of greedy divergences and the certificate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from harness import invariants
from harness.greedy import Divergence, check_greedy, ids_are_told
from harness.labels import synthetic_parts
from harness.metrics import CellData
from harness.noise import cell_noise, disturbances, quiet_sentence
from harness.plan import Cell
from harness.speedup import speedup

if TYPE_CHECKING:
    from harness.store import RunData


class Status(StrEnum):
    """Outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    TIE = "tie"  # outputs differ, but only where two logits are within rounding of each other
    SKIP = "skip"  # there is nothing to check it with


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome.

    Attributes:
        name: `greedy_equality`, `losslessness`, `aa_control`, `quiet_machine` or `invariants`.
        status: the outcome.
        detail: one line for people.
        cell: id of the cell; None when the check is about more than one.
        divergences: for `greedy_equality`, every output that differs (see `harness.greedy`).
    """

    name: str
    status: Status
    detail: str
    cell: str | None = None
    divergences: tuple[Divergence, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `divergences` only where there are some."""
        values = {"name": self.name, "status": str(self.status), "detail": self.detail}
        divergences = [asdict(divergence) for divergence in self.divergences]
        return values | {"cell": self.cell} | ({"divergences": divergences} if divergences else {})


def run_checks(run: RunData, cells: Sequence[CellData]) -> tuple[Check, ...]:
    """All checks of a run."""
    by_cell = {data.cell: data for data in cells}
    return (
        *_greedy_equality(run, by_cell),
        *_losslessness(run.manifest),
        *(_aa_control(data, by_cell) for data in cells if data.cell.control),
        _quiet_machine(run),
        _invariants(run, cells),
    )


def verified(manifest: Mapping[str, Any], cell: Cell) -> bool | None:
    """Whether the certificate passes the cell's method; None where it does not say."""
    for verdict in _verdicts(manifest):
        group = verdict["method"], verdict["temperature"], verdict["batch_size"]
        if group == (cell.method, cell.temperature, cell.batch_size):
            return {"pass": True, "fail": False}.get(verdict["status"])
    return None


def _verdicts(manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    certificate = manifest.get("certificate") or {"verdicts": ()}
    return tuple(certificate["verdicts"])


def _losslessness(manifest: Mapping[str, Any]) -> Iterable[Check]:
    """One check for each verdict at temperature > 0; `greedy_equality` is about temperature 0."""
    name = "losslessness"
    if synthetic_parts(manifest):
        yield Check(name, Status.SKIP, "not checked: the acceptance is synthetic, so is the text")
        return
    if "certificate" not in manifest:
        told = "unverified: no certificate; harness verify RUN makes one"
        yield Check(name, Status.SKIP, told)
    for verdict in _verdicts(manifest):
        if verdict["temperature"] == 0 and not verdict["content"]["after_eos"]:
            continue
        status = {"pass": Status.PASS, "fail": Status.FAIL}.get(verdict["status"], Status.SKIP)
        group = f"{verdict['method']} at temperature {verdict['temperature']:g}"
        told = f"{group}, batch size {verdict['batch_size']}: {verdict['tokens']} tokens, "
        yield Check(name, status, told + verdict["reason"])


def _greedy_equality(run: RunData, by_cell: Mapping[Cell, CellData]) -> Iterable[Check]:
    """One check for each greedy cell but the baseline's own at its smallest batch size.

    None where the text is made up.
    """
    if synthetic_parts(run.manifest):
        return
    stored = {
        (found["item"], found["request_id"]): Divergence(**found)
        for found in run.manifest.get("greedy", {}).get("divergences", ())
    }
    unclassified = check_greedy(run.requests, defaultdict(tuple), _NoReference()).divergences
    divergences = [
        stored.get((found.item, found.request_id), replace(found, gap=None))
        for found in unclassified
    ]
    for cell, data in by_cell.items():
        against = _compared_with(cell, by_cell)
        if cell.temperature == 0 and cell != against and ids_are_told(data.requests):
            items = set(data.requests["item"])
            own = tuple(found for found in divergences if found.item in items)
            yield _greedy_check(data, by_cell.get(against), own)


def _compared_with(cell: Cell, cells: Iterable[Cell]) -> Cell:
    """The baseline's cell at the same batch size; of the baseline itself at its smallest."""
    if cell != cell.group:
        return cell.group
    return min(other for other in cells if replace(other, batch_size=cell.batch_size) == cell)


class _NoReference:
    """Stands in for the target where only token ids are at hand: no divergence is then a tie."""

    def token_gap(self, ids: Sequence[int], first: int, second: int) -> float:  # noqa: ARG002
        return float("inf")

    def rounding_noise(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:  # noqa: ARG002
        return 0.0

    def dtype_noise(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:  # noqa: ARG002
        return 0.0


def _greedy_check(
    data: CellData, baseline: CellData | None, divergences: tuple[Divergence, ...]
) -> Check:
    name, cell = "greedy_equality", data.cell.id
    if baseline is None:
        return Check(name, Status.SKIP, f"{cell}: the run has no autoregressive cell", cell)
    compared = data.requests["request_id"].isin(baseline.requests["request_id"]).sum()
    if not divergences:
        return Check(name, Status.PASS, f"{cell}: {compared} of {compared} outputs equal", cell)
    failures = [found for found in divergences if not found.tie]
    status = Status.FAIL if failures else Status.TIE
    counts = f"{compared - len(divergences)} of {compared} outputs equal"
    worst = _describe((failures or divergences)[0])
    ties = f", {len(divergences) - len(failures)} within rounding"
    return Check(name, status, f"{cell}: {counts}{ties}; {worst}", cell, divergences)


def _describe(found: Divergence) -> str:
    gap = "not classified" if found.gap is None else f"logit gap {found.gap:.3g}"
    tokens = f"{found.expected} became {found.emitted}"
    return f"{found.request_id} at position {found.position}: {tokens} ({gap})"


def _aa_control(control: CellData, by_cell: Mapping[Cell, CellData]) -> Check:
    """The baseline measured twice: its speedup over itself must be 1 within its interval.

    The interval is a 95% one, so that one control in twenty fails by chance.
    """
    name, cell = "aa_control", control.cell.id
    baseline = by_cell.get(control.cell.group)
    ratio = speedup(control, baseline) if baseline is not None else None
    if ratio is None or ratio.low is None or ratio.high is None:
        return Check(name, Status.SKIP, f"{cell}: needs two prompts that both finished", cell)
    status = Status.PASS if ratio.low <= 1 <= ratio.high else Status.FAIL
    interval = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    return Check(name, status, f"{cell}: the baseline against itself is {interval}", cell)


def _quiet_machine(run: RunData) -> Check:
    """Whether nobody else used the machine; which cells were disturbed by what is a warning."""
    name, cells = "quiet_machine", cell_noise(run.conditions)
    if not cells:
        return Check(name, Status.SKIP, "the conditions of the items were not recorded")
    disturbed = {cell for found in disturbances(cells) for cell in found.cells}
    if disturbed:
        told = f"{len(disturbed)} of {len(cells)} cells were disturbed, as the warnings say"
        return Check(name, Status.FAIL, told)
    return Check(name, Status.PASS, f"{len(cells)} cells undisturbed; {quiet_sentence(cells)}")


def _invariants(run: RunData, cells: Sequence[CellData]) -> Check:
    faults = invariants.faults(run.requests, run.rounds, cells)
    if faults:
        detail = f"{len(faults)} rows do not add up; the first: {faults[0]}"
        return Check("invariants", Status.FAIL, detail)
    return Check("invariants", Status.PASS, f"{len(run.rounds)} rounds add up to their outputs")
