"""Several runs of one plan on one page: their speedups together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from harness import repeated_runs_lines as lines
from harness.errors import HarnessError
from harness.repeated_runs import RepeatedRuns, repeated_runs
from reports.colours import method_styles
from reports.tables import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.store import RunData

_COLUMNS = tuple(Value(name) for name in lines.COLUMNS[1:])


class RepeatedRow(NamedTuple):
    """A speedup as it is shown."""

    variable: str
    method: str
    where: str
    values: tuple[Value, ...]


class RepeatedView(NamedTuple):
    """The section of all runs together; without rows it has only its warnings."""

    columns: tuple[Value, ...]
    rows: tuple[RepeatedRow, ...]
    caption: str
    warnings: tuple[str, ...]


def view(runs: Sequence[RunData]) -> RepeatedView:
    """The runs together; where they are no runs of one plan, a warning that names why."""
    try:
        found = repeated_runs({f"run {number}": run for number, run in enumerate(runs, start=1)})
    except HarnessError as error:
        return RepeatedView((), (), "", (f"no speedups of all runs together: {error}",))
    return RepeatedView(_COLUMNS, tuple(_rows(found)), lines.legend(found), found.warnings)


def _rows(found: RepeatedRuns) -> Iterator[RepeatedRow]:
    styles = method_styles(own.method.partition("@")[0] for own in found.speedups)
    for group in lines.groups(found):
        for own in group.speedups:
            method, each, together, spread = lines.row(own)
            variable = styles[own.method.partition("@")[0]].variable
            value, _, interval = together.partition(" ")
            values = Value(each), Value(f"{value}x", interval), Value(spread)
            yield RepeatedRow(variable, method, group.title, values)
