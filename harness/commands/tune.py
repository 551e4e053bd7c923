"""`harness tune`: the best parameters of each method, for the runs to come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands.run import PATH, default_out, run_config, run_options

if TYPE_CHECKING:
    from rich.table import Table

    from harness.tuning.choices import Choice

_COLUMNS = ("rung", "candidate", "rounds", "tok/s", "")


@click.command()
@run_options
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1200,
    show_default=True,
    help="Measured for each method, temperature and batch size.",
)
@click.option("--out", type=PATH, help="Folder for its runs; runs/tune-TIME by default.")
def tune(
    config: Path | None,
    settings: tuple[str, ...],
    rounds: int,
    out: Path | None,
    **given: Any,
) -> None:
    """Search each method's parameters on tuning prompts; harness run then uses them.

    A choice holds for this pair, machine, placement and batch size, for greedy or for sampled
    decoding. Options given by --set are not searched.
    """
    from harness.progress import progress
    from harness.tuning.choices import write_choice
    from harness.tuning.search import tune as search
    from harness.tuning.usage import choices_folder

    resolved = run_config(config, settings, given)
    folder = choices_folder(resolved)
    out = out or default_out().with_name(f"tune-{default_out().name}")
    for choice in search(resolved, rounds, out, lambda: progress(sys.stderr)):
        path = write_choice(choice, folder)
        print_choice(choice)
        click.echo(f"stored: {path}")


def print_choice(choice: Choice) -> None:
    """The values chosen, then a line for each candidate in each rung."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(choice))


def _table(choice: Choice) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{choice.method} ({choice.setting}): {choice.words}; {choice.spent}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("candidate", "") else "right")
    for line in choice.lines():
        table.add_row(*line)
    return table
