"""The charts of the paper's figures: lines in one or two panels, with intervals where known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reports.colours import drawn, method_styles
from reports.svg import PANEL_WIDTH, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT, _LEFT, _FOOT, _TOP = 300.0, 62.0, 50.0, 16.0  # of a panel, in CSS pixels
_BODY = _HEIGHT - _FOOT - _TOP
_ACROSS = 2  # panels in a row
_LEGEND_ROW = 18.0


class Mark(NamedTuple):
    """A point and its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A series of a chart.

    Attributes:
        label: in the legend, and what the colour goes by.
        marks: in the order in which they are joined.
        fitted: a curve drawn without marks, dashed, in the same colour.
    """

    label: str
    marks: tuple[Mark, ...]
    fitted: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Axes of a figure.

    Attributes:
        x, y: labels.
        lines: what is drawn.
        log: both axes logarithmic.
        verticals: places on the x axis with a dashed line.
    """

    x: str
    y: str
    lines: tuple[Line, ...]
    log: bool = False
    verticals: tuple[float, ...] = ()


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Panels, two in a row, one legend below them; a label has one colour in all."""
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    styles = method_styles(labels)
    across = min(len(panels), _ACROSS)
    columns = max(1, int(across * PANEL_WIDTH // (40 + 7 * max(map(len, labels)))))
    rows, legend = -(-len(panels) // across), -(-len(labels) // columns) * _LEGEND_ROW
    height, width = rows * _HEIGHT + legend, PANEL_WIDTH * across
    figure = new_figure(height=height, width=width)
    for number, panel in enumerate(panels):
        row, column = divmod(number, across)
        bottom = legend + (rows - 1 - row) * _HEIGHT + _FOOT
        box = (column * PANEL_WIDTH + _LEFT, bottom, PANEL_WIDTH - _LEFT - 14, _BODY)
        axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        for line in panel.lines:
            style = styles[line.label]
            _draw_line(axes, line, style.colour, style.shape)
        _finish(axes, panel)
    shown = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {
        name: line for lines, names in shown for line, name in zip(lines, names, strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=columns, frameon=False
    )
    return figure


def _draw_line(axes: Axes, line: Line, colour: str, shape: str) -> None:
    x, y = [mark.x for mark in line.marks], [mark.y for mark in line.marks]
    look = {"color": colour, "label": line.label, "marker": shape}
    (plotted,) = axes.plot(x, y, linewidth=1.6, markersize=4.0 if len(x) > 12 else 6.5)
    plotted.set(**look, linestyle="none" if line.fitted else "-")
    for mark in line.marks:
        if mark.low is not None and mark.high is not None:
            axes.plot((mark.x, mark.x), (mark.low, mark.high), color=colour, linewidth=1.2)
    if line.fitted:
        curve = [mark.x for mark in line.fitted], [mark.y for mark in line.fitted]
        axes.plot(*curve, color=colour, linewidth=1.2, linestyle=(0, (4, 2)))


def _finish(axes: Axes, panel: Panel) -> None:
    places = sorted({mark.x for line in panel.lines for mark in (*line.marks, *line.fitted)})
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        powers = [2**n for n in range(20) if places[0] <= 2**n <= places[-1]]
        axes.set_xticks(powers, [str(power) for power in powers])
        lowest = min(mark.y for line in panel.lines for mark in line.marks if mark.y > 0)
        axes.set_ylim(0.7 * lowest, 1.1)
        shown = [tick for tick in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001) if tick > lowest]
        axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
        axes.minorticks_off()
    elif len(places) <= 8:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.margins(x=0.08, y=0.12)
    for place in panel.verticals:
        axes.axvline(place, color=drawn("muted"), linewidth=1.0, linestyle=(0, (4, 3)))
    axes.grid(visible=True)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
