"""What target and draft process did in a few rounds of one request, from the stored spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.decoder import SpanKind
from reports.colours import drawn
from reports.svg import bar_edge, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TARGET_LANE, _DRAFT_LANE = 1.0, 0.0
_BAR_HEIGHT = 0.62


class Stretch(NamedTuple):
    """A span in milliseconds since the start of its excerpt."""

    kind: SpanKind
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class TimelineRound:
    """One round of an excerpt; times in milliseconds since the start of the excerpt."""

    start_ms: float
    end_ms: float
    emitted: int
    cache: str | None
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Excerpt:
    """Consecutive rounds from the middle of one request."""

    method: str
    request_id: str
    rounds: tuple[TimelineRound, ...]

    @property
    def end_ms(self) -> float:
        return self.rounds[-1].end_ms

    @property
    def tokens(self) -> int:
        return sum(each.emitted for each in self.rounds)

    @property
    def has_draft_process(self) -> bool:
        return any(
            stretch.kind is SpanKind.SPECULATE for each in self.rounds for stretch in each.stretches
        )


def middle_excerpts(requests: pd.DataFrame, rounds: pd.DataFrame, count: int = 4) -> list[Excerpt]:
    """The same request under every drafting method, `count` rounds from its middle.

    Taken at the lowest temperature and smallest batch size: the longest request that all of them
    decoded. Empty where no rounds with spans are stored.

    Args:
        requests: all rows of requests.parquet.
        rounds: all rows of rounds.parquet.
        count: most rounds of each method.
    """
    drafting = set(rounds.loc[rounds["drafted"] > 0, "item"])
    rows = requests[requests["item"].isin(drafting) & ~requests["control"]]
    rows = rows[rows["temperature"] == rows["temperature"].min()]
    rows = rows[rows["batch_size"] == rows["batch_size"].min()]
    if rows.empty:
        return []
    methods = rows.groupby("request_id")["method"].transform("nunique")
    rows = rows[methods == methods.max()].sort_values(
        ["output_tokens", "request_id", "method"], ascending=[False, True, True]
    )
    chosen = rows[rows["request_id"] == rows["request_id"].iloc[0]]
    found = (
        _excerpt(rounds[rounds["item"] == row.item], str(row.method), str(row.request_id), count)
        for row in chosen.itertuples()
    )
    return [each for each in found if each is not None]


def _excerpt(rounds: pd.DataFrame, method: str, request_id: str, count: int) -> Excerpt | None:
    """The middle `count` rounds of a request in one work item; None without stored spans."""
    rows = rounds[rounds["request_id"] == request_id].sort_values("round")
    first = max(0, (len(rows) - count) // 2)
    rows = rows.iloc[first : first + count]
    if not any(len(spans) for spans in rows["spans"]):
        return None
    origin = int(rows["start_ns"].iloc[0])
    return Excerpt(method, request_id, tuple(_round(row, origin) for row in rows.itertuples()))


def _round(row: Any, origin: int) -> TimelineRound:
    def ms(value: int) -> float:
        return (value - origin) / 1e6

    return TimelineRound(
        start_ms=ms(row.start_ns),
        end_ms=ms(row.end_ns),
        emitted=int(row.emitted),
        cache=row.cache if isinstance(row.cache, str) else None,
        stretches=tuple(
            Stretch(SpanKind(span["kind"]), ms(span["start_ns"]), ms(span["end_ns"]))
            for span in row.spans
        ),
    )


def draw_timeline(shown: Excerpt, span_ms: float) -> Figure:
    """One lane per device; `span_ms` is the length of the time axis, equal in panels compared."""
    lanes = 2 if shown.has_draft_process else 1
    figure = new_figure(height=92 + 44 * lanes)
    height = 44 * lanes / (92 + 44 * lanes)
    axes = figure.add_axes((0.15, 46 / (92 + 44 * lanes), 0.83, height))
    for each in shown.rounds:
        _draw_round(axes, each, span_ms)
    axes.axvline(shown.end_ms, color=drawn("muted"), linewidth=0.8)
    axes.set_xlim(0, span_ms)
    axes.set_ylim(_TARGET_LANE + 0.5 - lanes, _TARGET_LANE + 0.5)
    names = {_TARGET_LANE: "target", _DRAFT_LANE: "draft\nprocess"}
    shown_lanes = list(names)[:lanes]
    axes.set_yticks(shown_lanes, [names[lane] for lane in shown_lanes])
    axes.tick_params(left=False)
    axes.set_xlabel("milliseconds")
    axes.spines["left"].set_visible(False)
    return figure


def _draw_round(axes: Axes, shown: TimelineRound, span_ms: float) -> None:
    for stretch in shown.stretches:
        lane = _DRAFT_LANE if stretch.kind is SpanKind.SPECULATE else _TARGET_LANE
        start, end = max(0.0, stretch.start_ms), min(span_ms, stretch.end_ms)
        axes.broken_barh(
            [(start, max(0.0, end - start))],
            (lane - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolor=drawn(stretch.kind.value),
            edgecolor=drawn("paper"),
            linewidth=bar_edge(end - start, span_ms),
        )
    axes.axvline(shown.start_ms, color=drawn("muted"), linewidth=0.8)
    label = f"+{shown.emitted}" + (f"\n{shown.cache}" if shown.cache else "")
    axes.annotate(
        label,
        ((shown.start_ms + shown.end_ms) / 2, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        linespacing=1.25,
    )


def describe(shown: Excerpt) -> str:
    """The excerpt in words, for those who do not see it."""
    steps = "; ".join(
        f"{each.emitted} tokens in {each.end_ms - each.start_ms:.1f} ms"
        + (f" (cache {each.cache})" if each.cache else "")
        for each in shown.rounds
    )
    return (
        f"{shown.method}, {len(shown.rounds)} consecutive rounds, "
        f"{shown.tokens} tokens in {shown.end_ms:.1f} ms: {steps}."
    )
