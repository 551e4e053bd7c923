"""A run's summary as Markdown, for a pull request or a step summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.messages import markdown
from harness.summary_lines import COLUMNS, TEXTS, energy_line, groups, notes, row


def as_markdown(run: str, summary: Mapping[str, Any]) -> str:
    """Warnings first, then a table for each dataset, temperature and batch size, then the checks.

    Args:
        run: what the run is called, in the heading.
        summary: of `harness.summary.summarise`.
    """
    lines = [f"### {markdown(run)}", ""]
    lines += [f"> warning: {markdown(warning)}  " for warning in summary["warnings"]]
    for group in groups(summary):
        lines += ["", *table_lines(group.title, COLUMNS, map(row, group.cells))]
    checks = (
        f"{check['status']} {check['name']}: {check['detail']}" for check in summary["checks"]
    )
    lines += ["", *_folded("Checks", checks)]
    told = (note for group in groups(summary) for note in notes(group.cells))
    lines += ["", *_folded("What the speeds are made of", (*told, energy_line(summary["cells"])))]
    return "\n".join(lines)


def table_lines(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table under its title; columns of text are set left."""
    yield f"**{markdown(title)}**"
    yield ""
    yield _line(columns)
    yield _line(["---" if column in TEXTS else "--:" for column in columns])
    yield from (_line(list(map(markdown, entries))) for entries in rows)


def _line(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _folded(title: str, sentences: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from (f"- {markdown(sentence)}" for sentence in sentences)
    yield ""
    yield "</details>"
