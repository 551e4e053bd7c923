"""The charts of a report. Each takes stored results and gives a matplotlib figure and its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reports.colours import MethodStyle, drawn
from reports.svg import PANEL_WIDTH, bar_edge, new_figure
from reports.tables import interval_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.metrics import PositionAcceptance
    from harness.statistics import Estimate

_ROW = 26.0  # CSS pixels of one row of a bar or interval chart
_HEAD = 30.0  # of the heading of a group of rows
_FOOT = 44.0  # of the axis below them
_LONGEST_LABEL = 20  # letters


class IntervalRow(NamedTuple):
    """One method's interval within a group (a dataset or a category)."""

    group: str
    method: str
    estimate: Estimate


@dataclass(frozen=True)
class RoundTime:
    """Where the mean round of one method goes, in milliseconds."""

    method: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def draw_intervals(
    rows: Sequence[IntervalRow],
    styles: Mapping[str, MethodStyle],
    label: str,
    reference: float | None = 1.0,
) -> Figure:
    """A dot and an interval for each row, under a heading for each group.

    Args:
        rows: of one chart.
        styles: by method.
        label: of the axis.
        reference: where a line is drawn, 1 for equal; None for an axis from 0 to 1 without one.
    """
    groups = list(dict.fromkeys(row.group for row in rows))
    body = _ROW * len(rows) + _HEAD * len(groups)
    left = _label_width([row.method for row in rows])
    figure, axes = _row_axes(body, left, right=132)
    position = 0.0
    for group in groups:
        _write_beside(axes, group, position + _HEAD * 0.6, left=-left, weight="bold")
        position += _HEAD
        for row in (row for row in rows if row.group == group):
            _draw_interval(axes, position + _ROW / 2, row, styles[row.method], left)
            position += _ROW
    if reference is None:
        axes.set_xlim(0, 1.02)
    else:
        ends = [reference, *(end for row in rows for end in _ends(row.estimate))]
        margin = 0.06 * (max(ends) - min(ends) + 0.1)
        axes.set_xlim(min(ends) - margin, max(ends) + margin)
        axes.axvline(reference, color=drawn("muted"), linewidth=1.0)
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(label)
    return figure


def _draw_interval(axes: Axes, y: float, row: IntervalRow, style: MethodStyle, left: float) -> None:
    ends = _ends(row.estimate)
    axes.plot(
        ends,
        [y] * len(ends),
        color=style.colour,
        linewidth=2.2,
        marker=style.shape,
        markersize=7,
        markevery=[len(ends) // 2],  # the value
        solid_capstyle="butt",
    )
    _write_beside(axes, short_label(row.method), y, left=-left)
    _write_beside(axes, interval_text(row.estimate), y, right=132)


def _ends(estimate: Estimate) -> list[float]:
    """(low, value, high), or the value alone where there is no interval."""
    ends = (estimate.low, estimate.value, estimate.high)
    return [end for end in ends if end is not None]


def draw_round_times(rows: Sequence[RoundTime]) -> Figure:
    """Stacked bars of the mean round; the total is written at the right."""
    left = _label_width([row.method for row in rows])
    figure, axes = _row_axes(_ROW * len(rows) + 8, left, right=78)
    longest = max(row.total for row in rows)
    for index, row in enumerate(rows):
        y, start = 4 + _ROW * (index + 0.5), 0.0
        for part, milliseconds in row.parts.items():
            axes.barh(
                y,
                milliseconds,
                height=_ROW * 0.68,
                left=start,
                color=drawn(part),
                edgecolor=drawn("paper"),
                linewidth=bar_edge(milliseconds, longest),
            )
            start += milliseconds
        _write_beside(axes, short_label(row.method), y, left=-left)
        _write_beside(axes, f"{row.total:.1f} ms", y, right=78)
    axes.set_xlim(0, longest * 1.02)
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds a round")
    return figure


def draw_acceptance(
    rates: Mapping[str, Sequence[PositionAcceptance]], styles: Mapping[str, MethodStyle]
) -> Figure:
    """Acceptance rate by drafted position, one line a method."""
    figure = new_figure(height=270)
    axes = figure.add_axes((58 / PANEL_WIDTH, 48 / 270, 384 / PANEL_WIDTH, 206 / 270))
    for method, series in rates.items():
        style = styles[method]
        positions, values = [at.position for at in series], [at.rate for at in series]
        axes.plot(
            positions, values, color=style.colour, marker=style.shape, markersize=7, linewidth=1.6
        )
    last = max(at.position for series in rates.values() for at in series)
    axes.set_xticks(range(1, last + 1))
    axes.set_xlim(0.5, last + 0.5)
    axes.set_ylim(0, 1.04)
    axes.grid(visible=True)
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted, if reached")
    return figure


def _row_axes(body: float, left: float, right: float) -> tuple[Figure, Axes]:
    """Axes whose y unit is one CSS pixel, growing downwards, with room for text beside them."""
    height = body + _FOOT
    figure = new_figure(height=height)
    width = PANEL_WIDTH - left - right
    axes = figure.add_axes((left / PANEL_WIDTH, _FOOT / height, width / PANEL_WIDTH, body / height))
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return figure, axes


def _label_width(labels: Sequence[str]) -> float:
    """Room for the longest label at the left of a chart, in CSS pixels."""
    return 14 + 8 * max(7, *(len(short_label(label)) for label in labels))


def short_label(label: str) -> str:
    """A label that leaves room for the chart; the words beside the chart have it in full."""
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _write_beside(
    axes: Axes, text: str, y: float, left: float = 0, right: float = 0, weight: str = "normal"
) -> None:
    """Text beside a row, `left` pixels from the left edge of the axes or ending `right` from it."""
    axes.annotate(
        text,
        (1.0 if right else 0.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(right or left, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontweight=weight,
        bbox={"facecolor": drawn("paper"), "edgecolor": "none", "pad": 1.0},
        annotation_clip=False,
    )
