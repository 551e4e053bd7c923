"""A comparison of two runs as a table, as Markdown, as JSON and as JUnit XML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from harness.comparison import CellComparison, Comparison, Verdict
from harness.messages import markdown

if TYPE_CHECKING:
    from harness.factors import Factors

SCHEMA = 1
_COLUMNS = ("cell", "speed", "p (Holm)", "gate", "acceptance", "hit rate", "step time", "verdict")
_WIDTH = 132  # columns that the table takes; a narrower terminal wraps it, nothing is cut


def as_table(comparison: Comparison) -> str:
    """For a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_title(comparison), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("cell", "verdict") else "right")
    for cell in comparison.cells:
        table.add_row(*_row(cell))
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    with console.capture() as captured:
        console.print(table)
        for line in _remarks(comparison):
            console.print(line, markup=False)
    return captured.get().rstrip("\n")


def as_markdown(comparison: Comparison) -> str:
    """For a pull request or a step summary."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(_row(cell) for cell in comparison.cells)]
    lines = [f"### {_title(comparison)}", ""]
    lines += ["| " + " | ".join(map(markdown, row)) + " |" for row in rows]
    lines += ["", *(f"- {markdown(line)}" for line in _remarks(comparison))]
    return "\n".join(lines)


def as_json(comparison: Comparison) -> str:
    """For scripts; the names in it are fixed."""
    from harness.store import to_json

    cells = [{"id": cell.cell.id, **asdict(cell)} for cell in comparison.cells]
    count = len(comparison.regressions)
    return to_json({"schema": SCHEMA, "regressions": count, **asdict(comparison), "cells": cells})


def as_junit(comparison: Comparison) -> str:
    """A test case for each cell; a regression is a failure, an undecided cell is skipped."""
    undecided = sum(cell.verdict is Verdict.UNDECIDED for cell in comparison.cells)
    suite = ElementTree.Element(
        "testsuite",
        name="harness compare",
        tests=str(len(comparison.cells)),
        failures=str(len(comparison.regressions)),
        errors="0",
        skipped=str(undecided),
    )
    for cell in comparison.cells:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"harness.compare.{cell.cell.dataset}", name=cell.cell.id
        )
        if cell.verdict is Verdict.REGRESSION:
            failure = ElementTree.SubElement(case, "failure", message=_sentence(cell))
            failure.text = _sentence(cell)
        elif cell.verdict is Verdict.UNDECIDED:
            ElementTree.SubElement(case, "skipped", message="too few prompts to compare")
    ElementTree.SubElement(suite, "system-out").text = "\n".join(_remarks(comparison))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "table": as_table,
    "markdown": as_markdown,
    "json": as_json,
    "junit": as_junit,
}


def _title(comparison: Comparison) -> str:
    return f"Speed of {comparison.new} over {comparison.base}"


def _row(cell: CellComparison) -> Sequence[str]:
    adjusted = "-" if cell.adjusted is None else f"{cell.adjusted:.2g}"
    return (
        cell.cell.id,
        _speed(cell) + ("" if cell.paired else " unpaired"),
        adjusted,
        f"{cell.gate:.1%}",
        *_factor_texts(cell.factors),
        _verdict_text(cell),
    )


def _factor_texts(found: Factors | None) -> Sequence[str]:
    if found is None:
        return ("-", "-", "-")
    return tuple(f"{each:.3f}x" for each in (found.acceptance, found.hit_rate, found.step_time))


def _verdict_text(cell: CellComparison) -> str:
    slow = cell.verdict in (Verdict.REGRESSION, Verdict.SLOWER)
    return f"{cell.verdict}: {cell.factors.blame}" if slow and cell.factors else str(cell.verdict)


def _speed(cell: CellComparison) -> str:
    value, low, high = cell.speed.value, cell.speed.low, cell.speed.high
    if value is None:
        return "-"
    if low is None or high is None:
        return f"{value:.3f}x"
    return f"{value:.3f}x [{low:.3f}, {high:.3f}]"


def _sentence(cell: CellComparison) -> str:
    blame = f"; {cell.factors.blame} is to blame" if cell.factors else ""
    return f"{cell.cell.id} runs at {_speed(cell)} of its speed, gate {cell.gate:.1%}{blame}"


def _remarks(comparison: Comparison) -> list[str]:
    count = len(comparison.regressions)
    outcome = f"{count} of {len(comparison.cells)} cells regressed" if count else "no regression"
    return [
        outcome,
        *(f"warning: {line}" for line in comparison.warnings),
        *(f"not in common: {line}" for line in comparison.differences),
    ]
