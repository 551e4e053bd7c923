"""The cells of one or more runs with their options, for figures over several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.fingerprint import machine_differences
from harness.labels import label
from harness.metrics import CellData, split_cells
from harness.plan import Cell
from reports import provenance
from reports.results import CellResult, read_results

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import RunData


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was neither degraded nor the A/A control.

    Attributes:
        figures: as the report of its run has them.
        data: the rows behind them.
        options: of its decoder, resolved.
        diagnostics: of its decoder.
    """

    figures: CellResult
    data: CellData
    options: Mapping[str, Any]
    diagnostics: Mapping[str, Any]

    @property
    def setting(self) -> tuple[str, float, int]:
        return self.figures.dataset, self.figures.temperature, self.figures.batch_size


@dataclass(frozen=True)
class PaperEvidence:
    """What the figures are drawn from.

    Attributes:
        pair, machine: names, for captions.
        label: what of the runs is not real (`harness.labels`).
        cells: of all runs; one that several runs have is taken from the first of them.
        rounds: rows of rounds.parquet with the `temperature` of their cell, all runs.
        commands: the command of each run.
    """

    pair: str
    machine: str
    label: str | None
    cells: tuple[MeasuredCell, ...]
    rounds: pd.DataFrame
    commands: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.pair} on {self.machine}"


def gather(runs: Sequence[RunData]) -> PaperEvidence:
    """Reads the cells of runs that were made on one machine with one pair.

    Raises:
        UsageError: the machines or the pairs differ.
    """
    import pandas as pd

    _refuse_unlike(runs)
    cells: dict[Cell, MeasuredCell] = {}
    for run in runs:
        for cell, measured in _cells(run):
            cells.setdefault(cell, measured)
    manifest = runs[0].manifest
    return PaperEvidence(
        provenance.pair_name(manifest),
        provenance.machine_name(manifest),
        label(manifest),
        tuple(cells.values()),
        pd.concat([_rounds(index, run) for index, run in enumerate(runs)], ignore_index=True),
        tuple(provenance.command(run.manifest) for run in runs),
    )


def varied(
    cells: Sequence[MeasuredCell], option: str, values: Sequence[Any] | None = None
) -> Iterator[dict[Any, list[MeasuredCell]]]:
    """Groups of cells whose decoders differ in nothing but one option: its value -> cells.

    Only groups with two values or more; `values` says which count, all by default.
    """
    groups: dict[str, dict[Any, list[MeasuredCell]]] = {}
    for cell in cells:
        if option not in cell.options or (values and cell.options[option] not in values):
            continue
        rest = {name: value for name, value in cell.options.items() if name != option}
        method = cell.figures.method.partition(":")[0]
        group = groups.setdefault(repr((method, sorted(rest.items()))), {})
        group.setdefault(cell.options[option], []).append(cell)
    yield from (group for group in groups.values() if len(group) > 1)


def _cells(run: RunData) -> Iterator[tuple[Cell, MeasuredCell]]:
    decoders = run.manifest.get("decoders") or {}
    data = {each.cell: each for each in split_cells(run.requests, run.rounds)}
    for figures in read_results(run).measured:
        decoder = decoders.get(figures.key.id, {})
        if not figures.degraded:
            own = decoder.get("options") or {}, decoder.get("diagnostics") or {}
            yield figures.key, MeasuredCell(figures, data[figures.key], *own)


def _rounds(index: int, run: RunData) -> pd.DataFrame:
    """The rounds of the measured cells; `sequence` tells one sequence of one run from the rest."""
    requests = run.requests[~run.requests["control"]]
    known = requests.drop_duplicates("item").set_index("item")[["method", "temperature"]]
    rounds = run.rounds.join(known, on="item", how="inner")
    sequence = f"{index}/" + rounds["item"] + "/" + rounds["request_id"]
    return rounds.drop(columns="spans").assign(sequence=sequence)


def _refuse_unlike(runs: Sequence[RunData]) -> None:
    first = runs[0].manifest
    for number, run in enumerate(runs[1:], start=2):
        machines = [each.get("fingerprint") or {} for each in (first, run.manifest)]
        found = machine_differences(*machines)
        if provenance.pair_name(first) != provenance.pair_name(run.manifest):
            found = ["the pair", *found]
        if found:
            raise UsageError(f"runs 1 and {number} differ, one figure cannot hold both: {found[0]}")
