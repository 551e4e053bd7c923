"""Charts of simulated answers as SVG files. Each carries a watermark: none is a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.colours import MethodStyle, drawn, method_styles
from reports.svg import PANEL_WIDTH, new_figure, standalone_svg, style

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.simulation.questions import Answer

_HEIGHT = 330.0  # CSS pixels
_LEGEND = 150.0  # at the right


def write_figures(answers: Sequence[Answer], folder: Path) -> list[Path]:
    """Writes `KEY.svg` for each answer; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for answer in answers:
        path = folder / f"{answer.key}.svg"
        with style():
            title = f"{answer.title} (simulated)"
            source = standalone_svg(draw_answer(answer), answer.key, title, answer.finding)
        path.write_text(source, encoding="utf-8")
        paths.append(path)
    return paths


def draw_answer(answer: Answer) -> Figure:
    """One line for each series, the title above, a watermark across."""
    figure = new_figure(height=_HEIGHT, width=PANEL_WIDTH + _LEGEND)
    width = PANEL_WIDTH + _LEGEND
    axes = figure.add_axes(
        (58 / width, 48 / _HEIGHT, (PANEL_WIDTH - 76) / width, (_HEIGHT - 84) / _HEIGHT)
    )
    styles = method_styles(line.label for line in answer.lines)
    for line in answer.lines:
        _draw_line(axes, line.label, line.points, styles[line.label])
    if answer.level is not None:
        axes.axhline(answer.level, color=drawn("muted"), linewidth=1.0)
    if answer.log_x:
        _log_axis(axes, sorted({x for line in answer.lines for x, _ in line.points}))
    axes.set_ylim(bottom=0)
    axes.grid(visible=True)
    axes.set_xlabel(answer.x)
    axes.set_ylabel(answer.y)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    figure.text(8 / width, 1 - 18 / _HEIGHT, answer.title, color=drawn("ink"), fontweight="bold")
    _watermark(axes)
    return figure


def _draw_line(
    axes: Axes, label: str, points: Sequence[tuple[float, float]], style: MethodStyle
) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(
        x, y, label=label, color=style.colour, marker=style.shape, markersize=6, linewidth=1.6
    )


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis that names the values that have room for their name."""
    axes.set_xscale("log")
    apart, named = (values[-1] / values[0]) ** 0.07, [values[0]]
    for value in values:
        if value >= apart * named[-1]:
            named.append(value)
    axes.set_xticks(named, [f"{value:g}" for value in named])
    axes.minorticks_off()


def _watermark(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "SIMULATED", transform=axes.transAxes, rotation=24, ha="center", va="center",
        fontsize=44, fontweight="bold", color=drawn("rule"), alpha=0.55, zorder=0,
    )  # fmt: skip
