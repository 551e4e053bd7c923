"""`harness dashboard`: many stored runs as a static site."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs_dir", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("site"),
    show_default=True,
    help="Folder of the site; an earlier build in it is used again.",
)
@click.option(
    "--reports",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Full reports to write at most, newest runs without one first.",
)
def dashboard(runs_dir: Path, out: Path, reports: int) -> None:
    """Write a static site of all runs and pytest-benchmark files below RUNS_DIR.

    Runs are grouped by machine and pair and never mixed across them. Each series is searched for
    steps; a regression is told with the commits on both sides of it.
    """
    from reports.dashboard.site import build_site

    site = build_site(runs_dir, out, reports)
    for each in site.unreadable:
        click.echo(f"warning: {each.source}: not read: {each.reason}", err=True)
    click.echo(
        f"{site.index}: {len(site.records)} runs in {len(site.groups)} groups, "
        f"{len(site.open_regressions)} open regressions"
    )
