"""The latency/throughput plane: tokens/s for one user against tokens/s of the whole machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.speedup import throughput
from harness.statistics import Estimate
from reports import intervals
from reports.colours import MethodStyle, drawn
from reports.figures import short_label
from reports.svg import PANEL_WIDTH, new_figure
from reports.tables import present

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.metrics import CellData
    from reports.results import CellResult

_HEIGHT, _LEFT, _FOOT, _TOP, _RIGHT = 330.0, 58.0, 48.0, 16.0, 18.0  # CSS pixels
_LEGEND_ROW = 18.0
_LETTER = 8.0  # of a label, a wide one
_MOST_LABELS = 16  # of a panel; with more points only those of the frontier have one
_MS = 1e6  # nanoseconds


@dataclass(frozen=True)
class PlanePoint:
    """One cell.

    Attributes:
        method, batch_size: which.
        per_user: tokens/s that one sequence sees, 1 / median TPOT, with its 95% interval.
        throughput: tokens/s of all sequences together, with its interval; of the whole target or
            per device, as the view has it.
    """

    method: str
    batch_size: int
    per_user: Estimate
    throughput: Estimate

    @property
    def x(self) -> float:
        return self.per_user.value or 0.0

    @property
    def y(self) -> float:
        return self.throughput.value or 0.0

    def per_device(self, devices: float) -> PlanePoint:
        """The same cell, its throughput divided by the devices that it uses."""
        return replace(self, throughput=_mapped(self.throughput, lambda value: value / devices))


class Plane(NamedTuple):
    """One view.

    Attributes:
        label: of the throughput axis.
        points: the cells of one dataset and temperature.
    """

    label: str
    points: Sequence[PlanePoint]


def plane_point(data: CellData) -> PlanePoint | None:
    """Where a cell stands; None without a request of two tokens.

    The interval of the throughput is the bootstrap's over prompts, that of the median TPOT the
    sign test's over requests.
    """
    tpot_ms = intervals.median(data.requests["tpot_ns"].dropna() / _MS)
    if not tpot_ms.value:
        return None
    speed = throughput([data])
    per_user = _mapped(tpot_ms, lambda milliseconds: 1000 / milliseconds)
    return PlanePoint(data.cell.method, data.cell.batch_size, per_user, speed)


def both_views(cells: Sequence[tuple[CellResult, CellData]], whole: str) -> tuple[Plane, ...]:
    """The whole target's view and the per-device one; empty with fewer than two cells to compare.

    Args:
        cells: of one dataset and temperature.
        whole: what the throughput of the first view is of, such as "on the same target".
    """
    target, device = [], []
    for cell, data in cells:
        per_device = cell.tokens_per_s_per_device
        if present(cell.tokens_per_s) and present(per_device) and (point := plane_point(data)):
            target.append(point)
            device.append(point.per_device(cell.tokens_per_s / per_device))
    if len(target) < 2:
        return ()
    return Plane(f"tokens/s {whole}", target), Plane("tokens/s per device", device)


def describe_plane(plane: Plane) -> str:
    """A view in words, for those who do not see it."""
    best = frontier(plane.points)
    words = (
        f"{p.method} at batch size {p.batch_size}: {p.x:.1f} tokens/s per user, "
        f"{p.y:.1f} {plane.label}" + ", on the frontier" * (p in best)
        for p in plane.points
    )
    return f"{'; '.join(words)}."


def frontier(points: Sequence[PlanePoint]) -> list[PlanePoint]:
    """The points that no other one equals or beats on both axes, by rising tokens/s per user."""
    best: list[PlanePoint] = []
    for point in sorted(points, key=lambda each: (each.x, each.y), reverse=True):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best[::-1]


def draw_planes(
    planes: Sequence[Plane], styles: Mapping[str, MethodStyle], top: float, *, legend: bool = False
) -> Figure:
    """Views side by side: a line a method over batch sizes, crosses for intervals, the frontier.

    Args:
        planes: views of the same cells.
        styles: by method.
        top: upper end of the throughput axes, equal in all that are compared.
        legend: whether the methods are named below.
    """
    rows = -(-len(styles) // (4 * len(planes))) if legend else 0
    width, foot = PANEL_WIDTH * len(planes), _FOOT + rows * _LEGEND_ROW
    height = _HEIGHT + rows * _LEGEND_ROW
    figure = new_figure(height=height, width=width)
    for number, plane in enumerate(planes):
        left = number * PANEL_WIDTH + _LEFT
        box = (left, foot, PANEL_WIDTH - _LEFT - _RIGHT, height - foot - _TOP)
        axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        _draw(axes, plane, styles, top)
    if legend:
        handles, names = figure.axes[0].get_legend_handles_labels()
        columns = 4 * len(planes)
        figure.legend(handles, names, loc="lower center", ncols=columns, frameon=False)
    return figure


def highest(planes: Sequence[Plane]) -> float:
    """The upper end of an axis that holds every interval."""
    return max(max(_ends(point.throughput)) for plane in planes for point in plane.points)


def _draw(axes: Axes, plane: Plane, styles: Mapping[str, MethodStyle], top: float) -> None:
    points = plane.points
    best = frontier(points)
    _draw_frontier(axes, best)
    labelled = points if len(points) <= _MOST_LABELS else best
    several = len({point.batch_size for point in points}) > 1
    right = 1.12 * max(max(_ends(point.per_user)) for point in points)
    for method in dict.fromkeys(point.method for point in points):
        own = sorted((p for p in points if p.method == method), key=lambda p: p.batch_size)
        style = styles[method]
        x, y = [point.x for point in own], [point.y for point in own]
        look: dict[str, Any] = {"color": style.colour, "marker": style.shape}
        axes.plot(x, y, markersize=6, linewidth=1.4, label=short_label(method), **look)
        for point in own:
            _draw_cross(axes, point, style)
            if point in labelled:
                label = f"b{point.batch_size}" if several else short_label(method)
                _write(axes, label, point, style, right)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.12 * top)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel(plane.label)


def _draw_frontier(axes: Axes, best: Sequence[PlanePoint]) -> None:
    """A staircase: left of and below it, some cell is at least as good on both axes."""
    x, y = [0.0], [best[0].y]
    for point, after in zip(best, [*best[1:], None], strict=True):
        x += [point.x, point.x]
        y += [point.y, after.y if after else 0.0]
    look: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (4, 3)), "zorder": 1}
    axes.plot(x, y, color=drawn("muted"), **look)


def _draw_cross(axes: Axes, point: PlanePoint, style: MethodStyle) -> None:
    look: dict[str, Any] = {
        "color": style.colour,
        "linewidth": 1.0,
        "alpha": 0.75,
        "solid_capstyle": "butt",
    }
    for x, y in (
        (_ends(point.per_user), (point.y, point.y)),
        ((point.x, point.x), _ends(point.throughput)),
    ):
        axes.plot(x, y, **look)


def _write(axes: Axes, label: str, point: PlanePoint, style: MethodStyle, right: float) -> None:
    """A label beside its point, left of it where there is no room; `right` is the axis' end."""
    room = (1 - point.x / right) * (PANEL_WIDTH - _LEFT - _RIGHT) + _RIGHT
    fits = 6 + _LETTER * len(label) <= room
    axes.annotate(
        label,
        (point.x, point.y),
        xytext=(6 if fits else -6, 5),
        textcoords="offset points",
        color=style.colour,
        ha="left" if fits else "right",
    )


def _ends(estimate: Estimate) -> tuple[float, float]:
    value = estimate.value or 0.0
    if estimate.low is None or estimate.high is None:
        return value, value
    return estimate.low, estimate.high


def _mapped(estimate: Estimate, change: Callable[[float], float]) -> Estimate:
    """The estimate of a monotone function of what is estimated."""
    value, *ends = (
        None if each is None else change(each)
        for each in (estimate.value, estimate.low, estimate.high)
    )
    low, high = (None, None) if None in ends else sorted(each for each in ends if each is not None)
    return Estimate(value, low, high, estimate.n)
