"""What a page needs of `harness.summary.summarise`, typed. Unknown names in it are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from harness.checks import Status
from harness.contention import Contention
from harness.energy import Energy
from harness.metrics import CellMetrics
from harness.plan import Cell
from harness.prediction import Prediction
from harness.speedup import Speedup

if TYPE_CHECKING:
    from harness.store import RunData


@dataclass(frozen=True)
class CategoryResult(CellMetrics):
    """The figures of a cell on the prompts of one category."""

    speedup: dict[str, Speedup]


@dataclass(frozen=True)
class CellResult(CellMetrics):
    """The figures of one cell, with what is told beside them.

    `verified` is what the losslessness certificate says of the method at this temperature and batch
    size, None where it says nothing; `degraded` is the reason why the target went on alone, or
    None; `untuned` says that the method ran on fixed default parameters, `automatic` that its
    defaults leave the choice to the method.
    """

    method: str
    control: bool
    dataset: str
    temperature: float
    batch_size: int
    verified: bool | None
    degraded: str | None
    untuned: bool
    automatic: bool
    prediction: Prediction | None
    contention: Contention | None
    energy: Energy | None
    speedup: dict[str, Speedup]
    categories: dict[str, CategoryResult]

    @property
    def key(self) -> Cell:
        """Which cell of the plan it is."""
        return Cell(self.method, self.dataset, self.temperature, self.batch_size, self.control)


@dataclass(frozen=True)
class CheckResult:
    """One check; definitions in `harness.checks.Check`."""

    name: str
    status: Status
    detail: str
    cell: str | None
    divergences: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class RunResult:
    """A run as summarised."""

    cells: tuple[CellResult, ...]
    checks: tuple[CheckResult, ...]
    warnings: tuple[str, ...]

    @property
    def measured(self) -> tuple[CellResult, ...]:
        """The cells without the A/A control."""
        return tuple(cell for cell in self.cells if not cell.control)

    def checks_named(self, name: str) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.name == name)


def read_results(run: RunData) -> RunResult:
    """Summarises a run."""
    from harness.summary import summarise

    return TypeAdapter(RunResult).validate_python(summarise(run))
