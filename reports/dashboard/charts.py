"""The chart of one metric over runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reports.colours import MethodStyle, drawn
from reports.svg import PANEL_WIDTH, inline_svg, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup
    from matplotlib.axes import Axes

    from reports.dashboard.records import Record
    from reports.dashboard.series import Change, Point, Series

SHOWN = 200  # runs in a chart, the latest ones; the feed has all
_HEIGHT, _LEFT, _FOOT = 250.0, 58.0, 56.0
_MOST_TICKS = 5
_FEW = 40  # points that are marked one by one


def draw_series(
    key: str,
    runs: Sequence[Record],
    series: Sequence[Series],
    changes: Sequence[Change],
    styles: Mapping[str, MethodStyle],
) -> Markup:
    """One line a method with its 95% intervals; a dashed line where a level changed.

    Args:
        key: unique on the page.
        runs: every run of the setting, oldest first: the places on the x axis.
        series: of one metric.
        changes: steps of these series.
        styles: by method.
    """
    shown = runs[-SHOWN:]
    place = {record.key: index for index, record in enumerate(shown)}
    figure = new_figure(height=_HEIGHT)
    box = (_LEFT, _FOOT, PANEL_WIDTH - _LEFT - 14, _HEIGHT - _FOOT - 14)
    axes = figure.add_axes(
        (box[0] / PANEL_WIDTH, box[1] / _HEIGHT, box[2] / PANEL_WIDTH, box[3] / _HEIGHT)
    )
    for each in series:
        own = [point for point in each.points if point.record.key in place]
        _draw_line(axes, [place[point.record.key] for point in own], own, styles[each.line])
    for index in sorted({place[c.after.key] for c in changes if c.after.key in place}):
        axes.axvline(index - 0.5, color=drawn("muted"), linewidth=1.0, linestyle=(0, (4, 3)))
    _label_runs(axes, shown)
    axes.margins(y=0.12)
    _widen(axes)
    axes.grid(visible=True, axis="y")
    axes.set_ylabel(series[0].metric.label)
    return inline_svg(figure, key, f"{series[0].metric.label} over runs", _words(series, changes))


def _draw_line(axes: Axes, x: Sequence[int], points: Sequence[Point], style: MethodStyle) -> None:
    marked: dict[str, Any] = {"marker": style.shape, "markersize": 5.0} if len(x) <= _FEW else {}
    axes.plot(x, [point.value for point in points], color=style.colour, linewidth=1.6, **marked)
    if len(x) <= _FEW:
        for at, point in zip(x, points, strict=True):
            if point.estimate.low is not None and point.estimate.high is not None:
                ends = (point.estimate.low, point.estimate.high)
                axes.plot((at, at), ends, color=style.colour, linewidth=1.0)
        return
    low = [p.value if p.estimate.low is None else p.estimate.low for p in points]
    high = [p.value if p.estimate.high is None else p.estimate.high for p in points]
    axes.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)


def _widen(axes: Axes) -> None:
    """At least a fifth of the level from bottom to top, so that noise does not look like much."""
    low, high = axes.get_ylim()
    missing = 0.2 * (low + high) / 2 - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def _label_runs(axes: Axes, runs: Sequence[Record]) -> None:
    """Date and commit below at most `_MOST_TICKS` of the runs."""
    step = max(1, -(-len(runs) // _MOST_TICKS))
    places = list(range(0, len(runs), step))
    axes.set_xticks(places)
    axes.set_xticklabels(
        [f"{runs[at].created[5:10]}\n{(runs[at].revision or '?')[:7]}" for at in places],
        fontsize=10.5,
    )
    axes.set_xlim(-0.5, max(len(runs) - 0.5, 0.5))


def _words(series: Sequence[Series], changes: Sequence[Change]) -> str:
    last = "; ".join(
        f"{each.line}: {each.points[-1].value:.{each.metric.digits}f} in the last of "
        f"{len(each.points)} runs"
        for each in series
    )
    steps = "; ".join(f"{c.series.line} {c.step.change:+.1%} at {c.commits}" for c in changes)
    return f"{last}. Steps: {steps or 'none'}."
