"""`harness show`: the figures of stored runs, as tables, as Markdown or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from harness.repeated_runs import RepeatedRuns

_WIDTH = 140  # columns that the table takes; a narrower terminal wraps it, nothing is cut
_LOSSLESS_STYLES = {True: "green", False: "bold red", None: "yellow"}
_CHECK_STYLES = {"pass": "green", "fail": "bold red", "tie": "yellow", "skip": "dim"}


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Markdown, for a pull request.")
@click.option(
    "--latency", is_flag=True, help="Also percentiles of latency and acceptance by position."
)
def show(runs: tuple[Path, ...], as_json: bool, as_markdown: bool, latency: bool) -> None:
    """Show the results, checks and warnings of a run directory.

    Several are taken together as runs of one plan on one machine: each run's speedups, their mean,
    and an interval that knows how much runs differ (docs/metrics.md). Make three or more.
    """
    from harness import summary_markdown
    from harness.errors import UsageError
    from harness.store import read_run, to_json
    from harness.summary import summarise

    if as_json + as_markdown + latency > 1:
        raise UsageError("--json, --markdown and --latency: choose one of them")
    if len(runs) > 1:
        if latency:
            raise UsageError("--latency shows one run at a time")
        _show_together(runs, as_json=as_json, as_markdown=as_markdown)
    elif as_json:
        click.echo(to_json(summarise(read_run(runs[0]))))
    elif as_markdown:
        click.echo(summary_markdown.as_markdown(runs[0].name, summarise(read_run(runs[0]))))
    else:
        print_run(runs[0], latency=latency)


def _show_together(runs: Sequence[Path], *, as_json: bool, as_markdown: bool) -> None:
    from harness import repeated_runs_lines as lines
    from harness.errors import UsageError
    from harness.repeated_runs import repeated_runs
    from harness.store import read_run

    names = [str(run) for run in runs]
    if len(set(names)) < len(names):
        raise UsageError("a run directory is named twice")
    found = repeated_runs({name: read_run(run) for name, run in zip(names, runs, strict=True)})
    if as_json:
        click.echo(lines.as_json(found))
    elif as_markdown:
        click.echo(lines.as_markdown(found))
    else:
        print_runs(found)


def print_runs(found: RepeatedRuns) -> None:
    """Prints a table for each dataset, temperature and batch size, then what they are of."""
    from harness import repeated_runs_lines as lines

    console = _console()
    for group in lines.groups(found):
        rows = (map(_text, lines.row(own)) for own in group.speedups)
        console.print(_table(group.title, lines.COLUMNS, rows))
    console.print(_text(lines.legend(found), "dim"))
    _print_warnings(console, found.warnings)


def print_run(run: Path, *, latency: bool = False) -> None:
    """Prints a table for each dataset, temperature and batch size, then checks and warnings.

    Below a table: what each speedup is made of, each cell's predicted speed beside the measured
    one, its energy and its contention. `latency` adds a table of percentiles and acceptance by
    position. In colour where the terminal has some.
    """
    from harness import summary_lines as lines
    from harness.labels import label
    from harness.store import read_run
    from harness.summary import summarise

    stored = read_run(run)
    summary, unreal = summarise(stored), label(stored.manifest)
    console = _console()
    for group in lines.groups(summary):
        title = f"{group.title}, {unreal}" if unreal else group.title
        console.print(_table(title, lines.COLUMNS, map(_styled_row, group.cells)))
        if latency:
            rows = (map(_text, row) for cell in group.cells for row in lines.latency_rows(cell))
            console.print(_table("latency", ("method", "ms", *lines.QUANTILES), rows))
            for line in filter(None, map(lines.acceptance_line, group.cells)):
                console.print(_text(line))
        for line in lines.notes(group.cells):
            console.print(_text(line, "dim"))
    console.print(_text(lines.energy_line(summary["cells"])))
    for check in summary["checks"]:
        status = _text(f"{check['status']:4}  ", _CHECK_STYLES[check["status"]])
        console.print(status + _text(f"{check['name']}: {check['detail']}"))
    _print_warnings(console, summary["warnings"])


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    return console


def _print_warnings(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(_text("warning: ", "yellow") + _text(warning))


def _table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Text]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from harness.summary_lines import TEXTS

    table = Table(title=_text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _styled_row(cell: Mapping[str, Any]) -> Sequence[Text]:
    from harness.summary_lines import row

    method, lossless, *figures, over_ar, over_sd = row(cell)
    return (
        _text(method, "bold"),
        _text(lossless, _LOSSLESS_STYLES[cell["verified"]]),
        *map(_text, figures),
        _text(over_ar, _ratio_style(cell["speedup"].get("ar"))),
        _text(over_sd, _ratio_style(cell["speedup"].get("sd"))),
    )


def _ratio_style(estimate: Mapping[str, float | None] | None) -> str:
    """Green or red only where the interval leaves out 1."""
    low, high = (estimate.get("low"), estimate.get("high")) if estimate else (None, None)
    if low is None or high is None or low <= 1 <= high:
        return ""
    return "green" if low > 1 else "red"


def _text(words: str, style: str = "") -> Text:
    """Names are other people's: no markup, no escape sequences."""
    from rich.text import Text

    from harness.messages import printable

    return Text(printable(words), style=style)
