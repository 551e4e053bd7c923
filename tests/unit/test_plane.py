"""The latency/throughput plane: where cells stand, their intervals, the frontier."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from harness.metrics import CellData
from harness.plan import Cell
from harness.statistics import Estimate
from reports import intervals
from reports.colours import method_styles
from reports.plane import (
    Plane,
    PlanePoint,
    describe_plane,
    draw_planes,
    frontier,
    highest,
    plane_point,
)
from reports.svg import inline_svg, style

MS = 1_000_000


def point(x: float, y: float, method: str = "sd", batch: int = 1) -> PlanePoint:
    return PlanePoint(method, batch, Estimate(x, 0.9 * x, 1.1 * x, 9), Estimate(y, y - 1, y + 1, 9))


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [point(1, 5), point(2, 3), point(3, 3), point(2, 4), point(1, 4), point(0.5, 5)]
    assert [(best.x, best.y) for best in frontier(points)] == [(1, 5), (2, 4), (3, 3)]
    assert len(frontier([point(2, 2), point(2, 2)])) == 1


def test_per_device_divides_the_throughput_alone() -> None:
    both = point(10, 20).per_device(2)
    assert both.throughput == Estimate(10, 9.5, 10.5, 9)
    assert both.per_user == point(10, 20).per_user


def data(tpot_ms: list[float]) -> CellData:
    """One request of 3 tokens a prompt, in two steps of twice its TPOT each, two live."""
    count = len(tpot_ms)
    names = {"item": "i", "request_id": [f"d/{at}/r0" for at in range(count)]}
    requests = pd.DataFrame(
        {
            **names,
            "prompt_index": range(count),
            "output_tokens": 3,
            "tpot_ns": np.array(tpot_ms) * MS,
        }
    )
    spans = np.array(tpot_ms) * 2 * MS
    round_of = [pd.DataFrame({**names, "start_ns": 0.0, "end_ns": spans, "live": 2})] * 2
    return CellData(Cell("sd", "d", 0.0, 2), requests, pd.concat(round_of))


def test_a_cell_stands_at_its_median_and_its_rate() -> None:
    found = plane_point(data([10, 20, 30, 40, 50, 80]))
    assert found is not None
    # The sign test's 95% interval of the median of six values is their range.
    assert (found.per_user.value, found.per_user.low, found.per_user.high) == pytest.approx(
        (1000 / 35, 1000 / 80, 1000 / 10)
    )
    # 3 tokens of each of 6; a request's share of its two steps is twice its TPOT
    assert found.y == pytest.approx(18 / (2 * 0.230))
    assert found.throughput.low is not None
    assert found.throughput.low < found.y < (found.throughput.high or 0)


def test_without_a_second_token_there_is_no_point() -> None:
    assert plane_point(data([float("nan")] * 3)) is None


def test_a_drawing_has_crosses_and_words() -> None:
    plane = Plane("tokens/s", [point(10, 20), point(5, 30, "ssd", 4), point(4, 4, "ssd", 1)])
    assert highest([plane]) == 31
    assert describe_plane(plane).startswith(
        "sd at batch size 1: 10.0 tokens/s per user, 20.0 tokens/s, on the frontier; ssd at"
    )
    assert describe_plane(plane).count("on the frontier") == 2
    with style():
        svg = inline_svg(draw_planes([plane], method_styles(["sd", "ssd"]), 31), "k", "", "")
    assert svg.count("opacity: 0.75") == 2 * 3  # a cross a point
    assert ">b4<" in svg


def test_a_long_name_at_the_right_edge_is_written_to_the_left_of_its_point() -> None:
    # The axis ends at 1.12 * 11; 20 letters have no room in the 90 pixels right of 10.
    plane = Plane("tokens/s", [point(10, 20, "m" * 30), point(10, 10, "sd"), point(1, 4, "n" * 30)])
    styles = method_styles(each.method for each in plane.points)
    with style():
        (axes,) = draw_planes([plane], styles, 21).axes
    sides = {text.get_text()[0]: text.get_ha() for text in axes.texts}
    assert sides == {"m": "right", "s": "left", "n": "left"}


def test_shares_stay_within_their_bounds() -> None:
    assert intervals.share([0, 0], [4, 6]) == Estimate(0.0, None, None, 2)
    assert intervals.share([], []).value is None
    wide = intervals.share([1, 9, 2], [9, 9, 2])
    assert wide.value == pytest.approx(12 / 20)
    assert wide.high == 1.0
