"""Stored runs as one HTML page that needs nothing else: no network, no torch, no script.

Where scripts may run, one of ours sorts the tables. Never measures: numbers come from
`harness.summary`, provenance from the manifest. Everything that a run holds (names, errors,
prompts) is text to be escaped, here and in the charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from harness.metrics import split_cells
from harness.summary import placement_convention
from reports import prediction, provenance, repeated, tables, tuning, verdict
from reports.checks import CheckView, check_views
from reports.colours import method_styles
from reports.downloads import ROOM, Download, downloads
from reports.results import read_results
from reports.sections import Evidence, FigureSection, figure_sections
from reports.templating import render_template, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from harness.store import RunData


@dataclass(frozen=True)
class RunView:
    """One run as the template shows it."""

    key: str
    title: str
    date: str
    facts: tuple[str, ...]
    verdict: tuple[str, ...]
    warnings: tuple[str, ...]
    checks: tuple[CheckView, ...]
    columns: tuple[tables.Value, ...]
    rows: tuple[tables.Row, ...]
    parts_columns: tuple[tables.Value, ...]
    parts_rows: tuple[tables.Row, ...]
    prediction_columns: tuple[tables.Value, ...]
    predictions: tuple[prediction.PredictionRow, ...]
    contention: tuple[str, ...]
    tuning_columns: tuple[str, ...]
    tunings: tuple[tuning.TuningTable, ...]
    figures: tuple[FigureSection, ...]
    failures: tuple[Mapping[str, Any], ...]
    skipped: tuple[Mapping[str, Any], ...]
    command: str
    sources: tuple[provenance.Source, ...]
    properties: tuple[provenance.Fact, ...]
    blocks: tuple[provenance.Block, ...]
    downloads: tuple[Download, ...]


def build(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the report of one or more runs.

    Args:
        run_dirs: run directories (docs/run-directory.md), finished or not.
        out: the HTML file; its folder is made where it does not exist.

    Returns:
        `out`.

    Raises:
        StoreError: a run directory cannot be read, or the page cannot be written.
    """
    from harness.store import read_run

    return write_text(out, render([read_run(directory) for directory in run_dirs]))


def render(runs: Sequence[RunData]) -> str:
    """The page as HTML; the same runs always give the same page."""
    room = ROOM // len(runs)
    views = [_view(f"run-{index}", run, room) for index, run in enumerate(runs, start=1)]
    if len(views) == 1:
        return render_template("page.html.j2", title=views[0].title, runs=views)
    unlike, together = _unlike_machines(runs), repeated.view(runs)
    return render_template(
        "page.html.j2",
        title=f"{len(views)} benchmark runs",
        runs=views,
        warnings=unlike or together.warnings,
        together=together,
    )


def _view(key: str, run: RunData, room: int) -> RunView:
    manifest, result = run.manifest, read_results(run)
    pair = provenance.pair_name(manifest)
    styles = method_styles(cell.method for cell in result.cells)
    sound = tuple(cell for cell in result.measured if not cell.degraded)
    placement = placement_convention(manifest)
    data = {each.cell: each for each in split_cells(run.requests, run.rounds)}
    evidence = Evidence(key, sound, data, run.requests, run.rounds, styles, placement)
    return RunView(
        key=key,
        title=pair,
        date=provenance.date(manifest),
        facts=provenance.headline(manifest),
        verdict=tuple(verdict.sentences(pair, result)),
        warnings=result.warnings,
        checks=tuple(check_views(result)),
        columns=tables.COLUMNS,
        rows=tuple(tables.table_rows(result.cells, styles)),
        parts_columns=tables.PARTS_COLUMNS,
        parts_rows=tuple(tables.parts_rows(result.cells, styles)),
        prediction_columns=prediction.COLUMNS,
        predictions=tuple(prediction.prediction_rows(sound, styles)),
        contention=tuple(prediction.contention_sentences(sound)),
        tuning_columns=tuning.COLUMNS,
        tunings=tuple(tuning.tuning_tables(manifest)),
        figures=tuple(figure_sections(evidence)),
        failures=tuple(manifest.get("failures") or ()),
        skipped=tuple(manifest.get("skipped_requests") or ()),
        command=provenance.command(manifest),
        sources=tuple(provenance.sources(manifest)),
        properties=(*provenance.facts(manifest), provenance.energy_fact(result, manifest)),
        blocks=tuple(provenance.blocks(manifest)),
        downloads=tuple(downloads(key, run, result, room)),
    )


def _unlike_machines(runs: Sequence[RunData]) -> list[str]:
    """One warning for each two neighbouring runs that were made on unlike machines."""
    from harness.fingerprint import machine_differences

    warnings = []
    for number, (left, right) in enumerate(pairwise(runs), start=1):
        found = machine_differences(
            *(run.manifest.get("fingerprint") or {} for run in (left, right))
        )
        if found:
            warnings.append(
                f"runs {number} and {number + 1} are from unlike machines, so their speeds do not "
                f"compare: {'; '.join(found)}"
            )
    return warnings
