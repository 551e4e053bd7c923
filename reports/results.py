"""What a page needs of `harness.summary.summarise`, typed. Unknown names in it are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from harness.checks import Status
from harness.contention import Contention
from harness.metrics import Percentiles
from harness.plan import Cell
from harness.prediction import Prediction
from harness.statistics import Estimate

if TYPE_CHECKING:
    from harness.store import RunData


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class CategoryResult(_Result):
    """A cell on the prompts of one category."""

    speedup: dict[str, Estimate]


class CellResult(_Result):
    """The figures of one cell; definitions in `harness.metrics.CellMetrics`.

    `degraded` is the reason why the target went on alone, or None.
    """

    method: str
    control: bool
    dataset: str
    temperature: float
    batch_size: int
    degraded: str | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    tpot_ms: Percentiles
    ttft_ms: Percentiles
    acceptance_length: float | None
    acceptance_rate: float | None
    hit_rate: float | None
    draft_ms: float | None
    verify_ms: float | None
    wait_ms: float | None
    prediction: Prediction | None
    contention: Contention | None
    speedup: dict[str, Estimate]
    categories: dict[str, CategoryResult]

    @property
    def item_prefix(self) -> str:
        """How the ids of the cell's work items begin."""
        cell = Cell(self.method, self.dataset, self.temperature, self.batch_size, self.control)
        return f"{cell.id}/"


class CheckResult(_Result):
    """One check; definitions in `harness.checks.Check`."""

    name: str
    status: Status
    detail: str
    cell: str | None
    divergences: tuple[dict[str, Any], ...] = ()


class RunResult(_Result):
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

    return RunResult.model_validate(summarise(run))
