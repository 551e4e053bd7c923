"""What each figure of the paper shows, from the cells of stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.plan import BASELINE
from harness.simulation.paper import PAIRS
from harness.statistics import Estimate
from harness.summary import BASELINES
from reports.colours import method_styles
from reports.figures import IntervalRow, draw_intervals
from reports.paper.charts import Line, Mark, Panel, draw_panels
from reports.paper.evidence import MeasuredCell, PaperEvidence, varied
from reports.paper.miss_rate import miss_rates
from reports.paper.residual import residual_mass
from reports.plane import Plane, PlanePoint, both_views, draw_planes, highest
from reports.tables import present

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PUBLISHED = "published, on other hardware"
_FAN_OUTS = ("uniform", "geometric", "adaptive", "confidence")


@dataclass(frozen=True)
class PaperFigure:
    """One figure: `KEY.svg`, `KEY.png` and `KEY.csv`.

    Attributes:
        key: names its files.
        title: one line.
        caption: how to read it, and what is not in it.
        table: the numbers behind it.
        draw: makes the chart, under `reports.svg.style()`.
    """

    key: str
    title: str
    caption: str
    table: pd.DataFrame
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class LeftOut:
    """A figure that the runs have no data for, and what it needs."""

    key: str
    needs: str


def paper_figures(evidence: PaperEvidence) -> Iterator[PaperFigure | LeftOut]:
    """Every figure, drawn or left out, in the paper's order."""
    yield _miss_rate(evidence)
    yield _fan_out(evidence)
    yield _saguaro_c(evidence)
    yield _residual(evidence)
    yield _fallback(evidence)
    yield _speed(evidence)
    yield from _pareto(evidence)


def _miss_rate(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    table = miss_rates(evidence.rounds)
    if table.empty:
        return LeftOut("miss-rate", "rounds of ssd with the draft's rank of each outcome")
    lines = []
    for (temperature, after), own in table.groupby(["temperature", "after"]):
        shown = own[own["miss_rate"] > 0]
        exponent = own["exponent"].iloc[0]
        label = f"T {temperature:g}, after {after} (r = {exponent:.2f})"
        marks = tuple(Mark(x, y) for x, y in zip(shown["fan_out"], shown["miss_rate"], strict=True))
        curve = tuple(Mark(x, y) for x, y in zip(own["fan_out"], own["fitted"], strict=True))
        if marks:
            lines.append(Line(label, marks, curve))
    panel = Panel("guesses at the position (F)", "miss rate", tuple(lines), log=True)
    return PaperFigure(
        "miss-rate",
        "Miss rate against fan-out",
        "How often the target's token was not among the draft's F likeliest at its position. "
        "Dashed: (1 + F)^-r, r by maximum likelihood, the power law shifted so that it is a "
        "distribution over ranks. Outcomes whose rank the run does not know are left out.",
        table,
        lambda: draw_panels([panel]),
    )


def _fan_out(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    rows = list(_rows(evidence, "fan_out", _FAN_OUTS))
    if not rows:
        return LeftOut("fan-out", "ssd with two values of fan_out, all other options equal")
    table = _frame(rows)
    panels = [
        Panel("temperature", f"{label}, batch size {size}", _lines(own, "temperature", metric))
        for size in sorted({row["batch_size"] for row in rows})
        if (own := [row for row in rows if row["batch_size"] == size])
        for metric, label in (("hit_rate", "cache hit rate"), ("tokens_per_s", "tokens/s"))
    ]
    return PaperFigure(
        "fan-out",
        "Uniform against geometric fan-out",
        "The same budget of guesses spread in different ways, at each temperature measured.",
        table,
        lambda: draw_panels(panels),
    )


def _saguaro_c(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    rows = [row for row in _rows(evidence, "saguaro_c") if row["temperature"] > 0]
    if len({row["saguaro_c"] for row in rows}) < 2:
        return LeftOut("saguaro-c", "ssd with two values of saguaro_c at a temperature above 0")
    rows.sort(key=lambda row: row["saguaro_c"])
    panels = [
        Panel("C", label, _lines(rows, "saguaro_c", metric, by=("temperature",)))
        for metric, label in (
            ("acceptance_rate", "acceptance rate"),
            ("hit_rate", "cache hit rate"),
            ("tokens_per_s", "tokens/s"),
        )
    ]
    return PaperFigure(
        "saguaro-c",
        "Saguaro sampling: acceptance against hits",
        "A smaller C takes mass from the guessed tokens in the draft's distribution, which leaves "
        "more of it in the residual: more hits, less acceptance. C = 1 is plain sampling.",
        _frame(rows),
        lambda: draw_panels(panels),
    )


def _residual(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    import pandas as pd

    found = {}
    for group in varied(evidence.cells, "saguaro_c"):
        for c, cells in group.items():
            for temperature in sorted({cell.figures.temperature for cell in cells} - {0.0}):
                own = [
                    each.data.rounds for each in cells if each.figures.temperature == temperature
                ]
                table = residual_mass(pd.concat(own))
                if not table.empty:
                    found[temperature, c] = table.assign(temperature=temperature, saguaro_c=c)
    if len({c for _, c in found}) < 2:
        return LeftOut("saguaro-residual", "the rounds of saguaro-c with the ranks of outcomes")
    panels = [
        Panel(
            "draft's likeliest tokens (F)",
            f"mass of the residual, temperature {t:g}",
            tuple(_mass_line(c, table) for (at, c), table in sorted(found.items()) if at == t),
        )
        for t in sorted({t for t, _ in found})
    ]
    return PaperFigure(
        "saguaro-residual",
        "The residual before and after Saguaro sampling",
        "How much of norm(max(p - q, 0)) lies on the draft's F likeliest tokens, the rejected one "
        "left out: the share of tokens emitted at rejections that were among them. C = 1: before; "
        "the smaller C, the more mass is moved to tokens that the cache holds.",
        pd.concat(found.values()),
        lambda: draw_panels(panels),
    )


def _mass_line(c: float, table: pd.DataFrame) -> Line:
    marks = zip(table["fan_out"].tolist(), table["mass"].tolist(), strict=True)
    label = f"C = {c:g}" + " (before)" * (c == 1)
    return Line(label, tuple(Mark(fan_out, mass) for fan_out, mass in marks))


def _fallback(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    rows = list(_rows(evidence, "fallback"))
    if len({row["batch_size"] for row in rows}) < 2:
        return LeftOut("fallback", "ssd with two values of fallback at two batch sizes")
    rows.sort(key=lambda row: row["batch_size"])
    temperatures = sorted({row["temperature"] for row in rows})
    panels = [
        Panel(
            "batch size",
            f"tokens/s at temperature {temperature:g}",
            _lines(own, "batch_size", "tokens_per_s"),
            verticals=_critical(own),
        )
        for temperature in temperatures
        if (own := [row for row in rows if row["temperature"] == temperature])
    ]
    return PaperFigure(
        "fallback",
        "Fallback against batch size",
        "Who drafts after a miss: the draft model just in time (neural), n-grams and filler "
        "(fast), or whichever the run's own times favour (adaptive). Dashed: the critical batch "
        "size that the run computed, from which on the fast one should win, if in the range.",
        _frame(rows),
        lambda: draw_panels(panels),
    )


def _speed(evidence: PaperEvidence) -> PaperFigure | LeftOut:
    rows = list(_speed_rows(evidence))
    if not rows:
        return LeftOut("speed", f"a method beside {BASELINE} on the same prompts")
    published = [row for row in rows if row["source"] == PUBLISHED]
    measured = [row for row in rows if row["source"] != PUBLISHED]
    intervals = [
        IntervalRow(
            f"{row['dataset']}, T {row['temperature']:g}, batch {row['batch_size']}"
            if row["source"] != PUBLISHED
            else f"{row['dataset']} ({PUBLISHED})",
            row["method"],
            Estimate(row["over_ar"], row["low"], row["high"], 0),
        )
        for row in (*measured, *published)
    ]
    styles = method_styles(row.method for row in intervals)
    return PaperFigure(
        "speed",
        "End-to-end speed by dataset",
        "Total decoding time of AR over that of each method on the same prompts, with 95% "
        "intervals. Below, the paper's own speeds over its own AR (batch 1, four H100 and one for "
        "the draft): other models on other hardware, not comparable in size.",
        _frame(rows),
        lambda: draw_intervals(intervals, styles, "times as fast as AR"),
    )


def _pareto(evidence: PaperEvidence) -> Iterator[PaperFigure | LeftOut]:
    groups: dict[tuple[str, float], list[MeasuredCell]] = {}
    for cell in evidence.cells:
        groups.setdefault((cell.figures.dataset, cell.figures.temperature), []).append(cell)
    found = {
        where: views
        for where, cells in groups.items()
        if (views := both_views([(c.figures, c.data) for c in cells], "on the same target"))
    }
    if not found:
        yield LeftOut("pareto", "two cells of one dataset and temperature that know their devices")
    for number, ((dataset, temperature), views) in enumerate(found.items(), start=1):
        yield _plane(f"pareto-{number}", f"{dataset}, temperature {temperature:g}", views)


def _plane(key: str, where: str, views: Sequence[Plane]) -> PaperFigure:
    styles = method_styles(point.method for view in views for point in view.points)
    rows = [_plane_row(view.label, point) for view in views for point in view.points]
    return PaperFigure(
        key,
        f"Latency and throughput, {where}",
        "Tokens/s of all sequences together against tokens/s per user (1 / median TPOT): on the "
        "same target, and divided by the devices that a method uses. A line joins one method's "
        "batch sizes (b), crosses are 95% intervals, and no cell lies beyond the dashed frontier.",
        _frame(rows),
        lambda: draw_planes(views, styles, highest(views), legend=True),
    )


def _plane_row(view: str, point: PlanePoint) -> dict[str, Any]:
    return {
        "view": view,
        "method": point.method,
        "batch_size": point.batch_size,
        "per_user": point.x,
        "per_user_low": point.per_user.low,
        "per_user_high": point.per_user.high,
        "throughput": point.y,
        "throughput_low": point.throughput.low,
        "throughput_high": point.throughput.high,
    }


def _rows(
    evidence: PaperEvidence, option: str, values: Sequence[Any] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each cell of the groups that vary one option."""
    for group in varied(evidence.cells, option, values):
        for value, cells in group.items():
            yield from (_row(cell, option, value) for cell in cells)


def _row(cell: MeasuredCell, option: str, value: Any) -> dict[str, Any]:
    found = cell.figures
    over = found.speedup.get(BASELINE)
    return {
        "method": found.method,
        "dataset": found.dataset,
        "temperature": found.temperature,
        "batch_size": found.batch_size,
        option: value,
        "label": f"{option} {value}",
        "hit_rate": found.hit_rate,
        "acceptance_rate": found.acceptance_rate,
        "tokens_a_round": found.acceptance_length,
        "tokens_per_s": found.tokens_per_s,
        "over_ar": over.value if over else None,
        "over_ar_low": over.low if over else None,
        "over_ar_high": over.high if over else None,
        "critical_batch_size": cell.diagnostics.get("critical_batch_size"),
    }


def _lines(
    rows: Sequence[dict[str, Any]], x: str, y: str, by: Sequence[str] = ()
) -> tuple[Line, ...]:
    """A line for each value of the option, dataset and whatever else is not on the x axis."""
    lines: dict[str, list[Mark]] = {}
    several = {
        name: len({row[name] for row in rows}) > 1
        for name in ("dataset", "temperature", "batch_size")
    }
    for row in sorted(rows, key=lambda row: row[x]):
        if not present(row[y]):
            continue
        words = [] if by else [row["label"]]
        words += [f"T {row['temperature']:g}"] * (x != "temperature" and several["temperature"])
        words += [f"batch {row['batch_size']}"] * (x != "batch_size" and several["batch_size"])
        words += [row["dataset"]] * several["dataset"]
        lines.setdefault(", ".join(words) or f"T {row['temperature']:g}", []).append(
            Mark(row[x], row[y])
        )
    return tuple(Line(label, tuple(marks)) for label, marks in lines.items())


def _critical(rows: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """The critical batch size of the largest batch that told one within the range measured."""
    sizes = [row["batch_size"] for row in rows]
    told = [row["critical_batch_size"] for row in rows if present(row["critical_batch_size"])]
    return tuple(told[-1:]) if told and min(sizes) <= told[-1] <= max(sizes) else ()


def _speed_rows(evidence: PaperEvidence) -> Iterator[dict[str, Any]]:
    for cell in evidence.cells:
        found = cell.figures
        over = found.speedup.get(BASELINE)
        if found.method == BASELINE or over is None or not present(over.value):
            continue
        yield {
            "source": "measured",
            "dataset": found.dataset,
            "temperature": found.temperature,
            "batch_size": found.batch_size,
            "method": found.method,
            "tokens_per_s": found.tokens_per_s,
            "over_ar": over.value,
            "low": over.low,
            "high": over.high,
        }
    if not any(cell.figures.speedup for cell in evidence.cells):
        return
    for pair, told in PAIRS.items():
        for method, speed in told.tokens_per_s.items():
            if method in (*BASELINES[1:], "ssd"):
                yield {
                    "source": PUBLISHED,
                    "dataset": pair,
                    "temperature": None,
                    "batch_size": 1,
                    "method": method,
                    "tokens_per_s": speed,
                    "over_ar": speed / told.tokens_per_s["ar"],
                    "low": None,
                    "high": None,
                }


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)
