"""Predicted against measured: what the speed formula makes of a cell's own rounds, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.tables import Value, present

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.prediction import Prediction
    from reports.colours import MethodStyle
    from reports.results import CellResult

COLUMNS = (
    Value("predicted", "tokens/s"),
    Value("measured", "tokens/s"),
    Value("efficiency", "measured / predicted"),
    Value("hit rate", "expected by the method"),
    Value("tokens on a hit", "expected from acceptance"),
    Value("tokens on a miss", "expected from acceptance"),
    Value("verification", "ms"),
    Value("build", "in verifications"),
    Value("backup", "in verifications"),
    Value("wait on a hit", "of a verification"),
)


@dataclass(frozen=True)
class PredictionRow:
    """One cell with a speculation cache."""

    variable: str
    method: str
    where: str
    values: tuple[Value | None, ...]


def prediction_rows(
    cells: Sequence[CellResult], styles: Mapping[str, MethodStyle]
) -> Iterator[PredictionRow]:
    """A row for each cell whose rounds have cache outcomes."""
    for cell in cells:
        if cell.prediction is not None:
            variable = styles[cell.method].variable
            yield PredictionRow(variable, cell.method, _where(cell), _values(cell.prediction))


def contention_sentences(cells: Sequence[CellResult]) -> Iterator[str]:
    """What the working draft costs a verification, for each cell that measured it."""
    for cell in cells:
        if cell.contention is not None:
            yield f"{cell.method}, {_where(cell)}: {cell.contention.sentence}."


def _where(cell: CellResult) -> str:
    return f"{cell.dataset}, temperature {cell.temperature:g}, batch size {cell.batch_size}"


def _values(found: Prediction) -> tuple[Value | None, ...]:
    return (
        _number(found.predicted_tokens_per_s, 1),
        _number(found.measured_tokens_per_s, 1),
        _number(found.efficiency, 3),
        _beside(found.hit_rate, found.expected_hit_rate, digits=3),
        _beside(found.tokens_on_hit, found.expected_on_hit),
        _beside(found.tokens_on_miss, found.expected_on_miss),
        _number(found.verify_ms, 1),
        _number(found.build_time, 2),
        _number(found.backup_time, 2),
        None if found.wait_on_hit is None else Value(f"{found.wait_on_hit:.1%}"),
    )


def _number(number: float | None, digits: int) -> Value | None:
    return Value(f"{number:,.{digits}f}") if present(number) else None


def _beside(measured: float | None, expected: float | None, digits: int = 2) -> Value | None:
    if measured is None:
        return None
    return Value(f"{measured:.{digits}f}", "" if expected is None else f"{expected:.{digits}f}")
