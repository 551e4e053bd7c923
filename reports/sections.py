"""The figures of a report with heading, caption and legend; those without data are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.metrics import acceptance_by_position
from harness.plan import BASELINE
from harness.summary import BASELINES
from reports import figures, intervals, timeline
from reports.plane import both_views, describe_plane, draw_planes, highest
from reports.svg import inline_svg, style
from reports.tables import interval_text, present

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from harness.metrics import CellData, PositionAcceptance
    from harness.plan import Cell
    from harness.statistics import Estimate
    from reports.colours import MethodStyle
    from reports.results import CategoryResult, CellResult

_SETTING = ("temperature", "batch_size")
_WHOLE = {
    "equal-target": ("Equal target resources", "on the same target"),
    "pooled": ("Pooled resources", "on the same cores"),
}
_PLANE = {
    "equal-target": "At equal target resources, every method has the same target devices",
    "pooled": "With pooled resources, synchronous methods have the draft's devices too",
}
_SPAN_LABELS = {
    "verify": "verify (target)",
    "draft": "draft (on the critical path)",
    "wait": "wait for the draft process",
    "transfer": "transfer (messages and q's on their way)",
    "other": "everything else",
    "speculate": "speculate (draft process, meanwhile)",
}


class LegendEntry(NamedTuple):
    """A colour, for lines also the shape of their marks, and what they stand for."""

    variable: str
    label: str
    glyph: str = "■"


class Panel(NamedTuple):
    """One chart."""

    title: str
    svg: Markup


@dataclass(frozen=True)
class FigureSection:
    """A heading, what to read, and the charts."""

    heading: str
    caption: str
    legend: tuple[LegendEntry, ...]
    panels: tuple[Panel, ...]


class _Drawing(NamedTuple):
    title: str
    figure: Figure
    description: str


@dataclass(frozen=True)
class Evidence:
    """What the figures of one run are drawn from.

    Attributes:
        key: prefix of every id in the page that belongs to this run.
        cells: summaries of the measured cells, A/A control left out.
        data: the rows behind each.
        requests: all rows of requests.parquet.
        rounds: all rows of rounds.parquet.
        styles: by method.
        placement: the convention by which synchronous methods have their cores.
    """

    key: str
    cells: Sequence[CellResult]
    data: Mapping[Cell, CellData]
    requests: pd.DataFrame
    rounds: pd.DataFrame
    styles: Mapping[str, MethodStyle]
    placement: str = "equal-target"


def figure_sections(evidence: Evidence) -> list[FigureSection]:
    """Every figure that the run has data for, in reading order."""
    with style():
        sections = (
            _plane(evidence),
            _speedups(evidence),
            _categories(evidence),
            _acceptance(evidence),
            _hit_rates(evidence),
            _round_times(evidence),
            _timelines(evidence),
        )
        return [section for section in sections if section is not None]


def _section(
    evidence: Evidence,
    name: str,
    heading: str,
    caption: str,
    legend: Iterable[LegendEntry],
    drawings: Sequence[_Drawing],
) -> FigureSection | None:
    if not drawings:
        return None
    panels = tuple(
        Panel(
            drawing.title,
            inline_svg(
                drawing.figure,
                f"{evidence.key}-{name}-{index}",
                f"{heading}: {drawing.title}",
                drawing.description,
            ),
        )
        for index, drawing in enumerate(drawings)
    )
    return FigureSection(heading, caption, tuple(legend), panels)


def _method_legend(evidence: Evidence, methods: Iterable[str]) -> list[LegendEntry]:
    styles = {name: evidence.styles[name] for name in dict.fromkeys(methods)}
    return [LegendEntry(look.variable, name, look.glyph) for name, look in styles.items()]


def _span_legend(kinds: Iterable[str]) -> list[LegendEntry]:
    return [LegendEntry(kind, label) for kind, label in _SPAN_LABELS.items() if kind in kinds]


def _speedups(evidence: Evidence) -> FigureSection | None:
    drawings = []
    for (temperature, batch_size), cells in _by(evidence.cells, _SETTING):
        where = f"temperature {temperature:g}, batch size {batch_size}"
        for baseline in BASELINES:
            rows = [
                figures.IntervalRow(cell.dataset, cell.method, cell.speedup[baseline])
                for cell in cells
                if cell.method != BASELINE and _has_speedup(cell, baseline)
            ]
            drawings += _interval_drawing(rows, evidence.styles, baseline, where)
    return _section(
        evidence,
        "speedup",
        "Speedup by dataset",
        "Ratio of total decoding times on the same prompts. Right of the line at 1 is faster; "
        "where the bar crosses the line, the run shows no difference.",
        (),
        drawings,
    )


def _categories(evidence: Evidence) -> FigureSection | None:
    drawings = []
    for (dataset, temperature, batch_size), cells in _by(evidence.cells, ("dataset", *_SETTING)):
        where = f"{dataset}, temperature {temperature:g}, batch size {batch_size}"
        for baseline in BASELINES:
            rows = [
                figures.IntervalRow(name, cell.method, category.speedup[baseline])
                for name in sorted({name for cell in cells for name in cell.categories})
                for cell in cells
                if cell.method != BASELINE
                and (category := cell.categories.get(name))
                and _has_speedup(category, baseline)
            ]
            drawings += _interval_drawing(rows, evidence.styles, baseline, where)
    return _section(
        evidence,
        "category",
        "Speedup by category of prompt",
        "As above, on the prompts of one category each; fewer prompts, wider intervals.",
        (),
        drawings,
    )


def _has_speedup(result: CellResult | CategoryResult, baseline: str) -> bool:
    return baseline in result.speedup and present(result.speedup[baseline].value)


def _interval_drawing(
    rows: Sequence[figures.IntervalRow],
    styles: Mapping[str, MethodStyle],
    baseline: str,
    where: str,
) -> list[_Drawing]:
    """The chart of the rows; none without rows."""
    if not rows:
        return []
    figure = figures.draw_intervals(rows, styles, f"times as fast as {baseline.upper()}")
    return [_Drawing(f"Over {baseline.upper()}, {where}", figure, _describe_rows(rows))]


def _plane(evidence: Evidence) -> FigureSection | None:
    drawings, methods = [], []
    for (dataset, temperature), cells in _by(evidence.cells, ("dataset", "temperature")):
        name, whole = _WHOLE[evidence.placement]
        views = both_views([(cell, evidence.data[cell.key]) for cell in cells], whole)
        methods += [point.method for view in views for point in view.points]
        for view, title in zip(views, (name, "Per device"), strict=False):
            figure = draw_planes([view], evidence.styles, highest(views))
            title = f"{title}: {dataset}, temperature {temperature:g}"
            drawings.append(_Drawing(title, figure, describe_plane(view)))
    return _section(
        evidence,
        "plane",
        "Latency and throughput",
        "Up is more tokens from the machine, right is more for each user (1 / median TPOT); up and "
        f"right is better. {_PLANE[evidence.placement]}; "
        "per device, the tokens are divided by all the devices a method uses, the draft's own "
        "included. A line joins one method's batch sizes (b), crosses are 95% intervals, and no "
        "cell lies beyond the dashed frontier.",
        [*_method_legend(evidence, methods), LegendEntry("muted", "frontier", "┄")],
        drawings,
    )


def _hit_rates(evidence: Evidence) -> FigureSection | None:
    drawings = []
    for (temperature, batch_size), cells in _by(evidence.cells, _SETTING):
        rows = [
            figures.IntervalRow(cell.dataset, cell.method, _hit_rate(evidence.data[cell.key]))
            for cell in cells
            if present(cell.hit_rate)
        ]
        if rows:
            where = f"Temperature {temperature:g}, batch size {batch_size}"
            figure = figures.draw_intervals(rows, evidence.styles, "cache hit rate", reference=None)
            drawings.append(_Drawing(where, figure, _describe_rows(rows)))
    return _section(
        evidence,
        "hits",
        "Cache hit rate",
        "How many of the verifications' outcomes were in the speculation cache, with 95% intervals "
        "over prompts. A hit has its draft ready; a miss waits for the backup.",
        (),
        drawings,
    )


def _hit_rate(data: CellData) -> Estimate:
    """Hits over outcomes that were looked up, with an interval over prompts."""
    looked = data.rounds[data.rounds["cache"].notna()]
    prompts = data.requests.set_index(["item", "request_id"])["prompt_index"].rename("prompt")
    by_prompt = looked.join(prompts, on=["item", "request_id"]).groupby("prompt")["cache"]
    return intervals.share(by_prompt.agg(lambda own: (own == "hit").sum()), by_prompt.size())


def _round_times(evidence: Evidence) -> FigureSection | None:
    drawings, parts = [], set()
    for (dataset, temperature, batch_size), cells in _by(evidence.cells, ("dataset", *_SETTING)):
        rows = [row for cell in cells if (row := _round_time(cell))]
        if rows:
            parts |= {part for row in rows for part, value in row.parts.items() if value > 0}
            where = f"{dataset}, temperature {temperature:g}, batch size {batch_size}"
            words = "; ".join(_describe_round_time(row) for row in rows)
            drawings.append(_Drawing(where, figures.draw_round_times(rows), f"{words}."))
    return _section(
        evidence,
        "round",
        "Where a round's time goes",
        "The mean step of each method, by what the critical path was doing. Transfer is the time "
        "for which the target waits while a message or q's are on their way to or from the draft "
        f"process, or tells it the outcome{_untold_transfers(evidence.cells)}. A longer round may "
        "still be the better one: compare it with the tokens a round in the table.",
        _span_legend(parts),
        drawings,
    )


def _round_time(cell: CellResult) -> figures.RoundTime | None:
    """The mean step of a cell, in milliseconds; None where the decoder reports no spans."""
    if cell.step_ms is None or cell.verify_ms is None:
        return None
    parts = {
        "verify": cell.verify_ms,
        "draft": cell.draft_ms or 0.0,
        "wait": cell.wait_ms or 0.0,
        "transfer": cell.transfer_ms or 0.0,
    }
    other = max(0.0, cell.step_ms - sum(parts.values()))
    return figures.RoundTime(cell.method, parts | {"other": other})


def _untold_transfers(cells: Iterable[CellResult]) -> str:
    """What to add of a run from before schema 3."""
    told = all(cell.transfer_ms is not None for cell in cells if cell.verify_ms is not None)
    return "" if told else "; this run is from before it was told apart, and has it in wait"


def _timelines(evidence: Evidence) -> FigureSection | None:
    excerpts = timeline.middle_excerpts(evidence.requests, evidence.rounds)
    if not excerpts:
        return None
    span_ms = max(each.end_ms for each in excerpts)
    kinds = {s.kind.value for each in excerpts for r in each.rounds for s in r.stretches}
    return _section(
        evidence,
        "timeline",
        "A few rounds, as they happened",
        "Consecutive rounds from the middle of one request, at the lowest temperature and smallest "
        "batch size, all on one time scale. Above each round: the tokens it emitted and, with a "
        "speculation cache, whether it was a hit.",
        _span_legend(kinds),
        [
            _Drawing(
                f"{each.method}: {each.request_id}",
                timeline.draw_timeline(each, span_ms),
                timeline.describe(each),
            )
            for each in excerpts
        ],
    )


def _acceptance(evidence: Evidence) -> FigureSection | None:
    drawings, methods = [], []
    measured = evidence.requests[~evidence.requests["control"]]
    for temperature, requests in measured.groupby("temperature"):
        rates = {}
        for method, rows in requests.groupby("method"):
            own = evidence.rounds[evidence.rounds["item"].isin(rows["item"].unique())]
            if series := acceptance_by_position(own):
                rates[str(method)] = series
        if rates:
            methods += list(rates)
            drawings.append(
                _Drawing(
                    f"temperature {temperature:g}",
                    figures.draw_acceptance(rates, evidence.styles),
                    _describe_acceptance(rates),
                )
            )
    return _section(
        evidence,
        "acceptance",
        "Acceptance by position",
        "How often the token drafted at a position was accepted, counting only the rounds in which "
        "all before it were; over all datasets and batch sizes.",
        _method_legend(evidence, methods),
        drawings,
    )


def _by(
    cells: Sequence[CellResult], fields: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], list[CellResult]]]:
    """The cells by their values of `fields`, in the order in which these first occur."""
    grouped: dict[tuple[Any, ...], list[CellResult]] = {}
    for cell in cells:
        grouped.setdefault(tuple(getattr(cell, field) for field in fields), []).append(cell)
    yield from grouped.items()


def _describe_round_time(row: figures.RoundTime) -> str:
    parts = ", ".join(f"{part} {value:.1f}" for part, value in row.parts.items())
    return f"{row.method}: {row.total:.1f} ms a round ({parts})"


def _describe_rows(rows: Sequence[figures.IntervalRow]) -> str:
    words = (f"{row.group}, {row.method}: {interval_text(row.estimate)}" for row in rows)
    return f"{'; '.join(words)}."


def _describe_acceptance(rates: Mapping[str, Sequence[PositionAcceptance]]) -> str:
    lines = (
        f"{method}: " + ", ".join(f"position {at.position} {at.rate:.2f}" for at in series)
        for method, series in rates.items()
    )
    return "; ".join(lines) + "."
