"""`harness paper`: the SSD paper's figures from stored runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the figures; by default paper/ in the first run directory.",
)
def paper(runs: tuple[Path, ...], out: Path | None) -> None:
    """Draw the SSD paper's figures from run directories of one machine and pair.

    Each figure is an SVG, a PNG and the CSV behind it. One whose data the runs lack is left out
    and named. configs/paper-cpu.yaml and configs/paper-h100.yaml measure all of them.
    """
    from reports.paper.files import write_paper

    written = write_paper(runs, out or runs[0] / "paper")
    for figure in written.figures:
        click.echo(f"{written.index.parent / figure.key}.svg: {figure.title}")
    for each in written.left_out:
        click.echo(f"left out: {each.key}: needs {each.needs}")
    click.echo(str(written.index))
