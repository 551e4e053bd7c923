"""Writes the figures: SVG, PNG and CSV each, and an index page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import StoreError
from reports.csv_files import csv_text
from reports.paper.evidence import PaperEvidence, gather
from reports.paper.figures import LeftOut, PaperFigure, paper_figures
from reports.svg import inline_svg, save_png, standalone_svg, style
from reports.templating import render_template, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Written:
    """What was made.

    Attributes:
        index: the page with all figures.
        figures: those that were drawn.
        left_out: those that the runs have no data for.
    """

    index: Path
    figures: tuple[PaperFigure, ...]
    left_out: tuple[LeftOut, ...]


def write_paper(run_dirs: Sequence[Path], out: Path) -> Written:
    """Draws every figure that the runs have data for.

    Args:
        run_dirs: run directories of one machine and pair.
        out: folder of `KEY.svg`, `KEY.png`, `KEY.csv` and `index.html`.

    Raises:
        StoreError: a run cannot be read, or the folder not written.
        UsageError: the runs are from unlike machines or pairs.
    """
    from harness.store import read_run

    evidence = gather([read_run(directory) for directory in run_dirs])
    found = list(paper_figures(evidence))
    drawn = tuple(each for each in found if isinstance(each, PaperFigure))
    left_out = tuple(each for each in found if isinstance(each, LeftOut))
    with style():
        charts = [(figure, _write(figure, evidence, out)) for figure in drawn]
    page = render_template(
        "paper.html.j2",
        title=f"The paper's figures: {evidence.where}",
        evidence=evidence,
        charts=charts,
        left_out=left_out,
    )
    return Written(write_text(out / "index.html", page), drawn, left_out)


def _write(figure: PaperFigure, evidence: PaperEvidence, out: Path) -> str:
    """Writes the three files; the chart for the page."""
    words = f"{figure.caption} Measured with {evidence.where}."
    chart = figure.draw()
    on_page = inline_svg(chart, figure.key, figure.title, words)
    alone = standalone_svg(chart, figure.key, figure.title, words)
    write_text(out / f"{figure.key}.svg", alone)
    table = figure.table.assign(label=evidence.label) if evidence.label else figure.table
    write_text(out / f"{figure.key}.csv", csv_text(table))
    try:
        save_png(chart, out / f"{figure.key}.png")
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror or error}") from error
    return on_page
