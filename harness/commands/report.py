"""`harness report`: stored runs as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write; by default report.html in the first run directory.",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write an HTML report of one or more run directories.

    Runs of one plan on one machine are also taken together, as `harness show` does.
    """
    from reports.page import build

    click.echo(build(runs, out or runs[0] / "report.html"))
