"""Timings and replays of stored rounds, worked by hand."""

import pandas as pd
import pytest

from harness.simulation.acceptance import trace_of
from harness.simulation.validation import median_error, method_of, replay, timings

_MS = 1_000_000


def rounds(rows, method="ssd"):
    """Rows of (request, emitted, drafted, cache, verify ms, other ms)."""
    table, seen, clock = [], {}, 0
    for step, (request, emitted, drafted, cache, verify, other) in enumerate(rows):
        end = clock + (verify + other) * _MS
        table.append(
            {
                "item": f"{method}/mini/t0/b1/r0/k0",
                "request_id": request,
                "step": step,
                "round": seen.get(request, 0),
                "start_ns": clock,
                "end_ns": end,
                "live": 1,
                "emitted": emitted,
                "drafted": drafted,
                "accepted": emitted - 1,
                "cache": cache,
                "rank": None,
                "verify_ns": verify * _MS,
            }
        )
        seen[request], clock = seen.get(request, 0) + 1, end
    return pd.DataFrame(table)


CELL = [
    # First round: drafted in time. Then a hit that waited 1 ms, then a miss: 4 tokens at 10 ms.
    *[(r, 3, 4, None, 100, 41) for r in "ab"],
    *[(r, 5, 4, "hit", 100, 1) for r in "ab"],
    *[(r, 1, 4, "miss", 100, 41) for r in "ab"],
]


def test_timings_by_hand():
    found = timings(rounds(CELL))
    assert found.transfer_s == pytest.approx(1e-3)
    assert found.draft_idle.times.seconds == pytest.approx((10e-3,))
    assert found.verify_idle.times.tokens == (5,)
    assert found.verify_idle.times.seconds == pytest.approx((0.1,))


def test_a_rare_size_does_not_lift_the_larger_ones():
    many = [("a", 1, 6, None, 100, 0)] * 98
    found = timings(rounds([("a", 1, 4, None, 200, 0), ("a", 1, 2, None, 50, 0), *many]))
    # 5 tokens cost more than 7: pooled, (200 + 98 * 100) / 99.
    assert found.verify_idle.times.seconds == pytest.approx((0.05, 10 / 99, 10 / 99))


def test_the_outcome_is_told_by_the_round_after_it():
    trace = trace_of(rounds(CELL))
    assert trace.accepted.tolist() == [2, 4, 0] * 2
    assert trace.ranks.tolist() == [1, float("inf"), float("inf")] * 2  # hit, miss, the end
    ranked = rounds(CELL).assign(rank=[None, None, 2, 3, 7, 8])
    assert trace_of(ranked).ranks.tolist()[:2] == [2, 7]


def test_a_cell_is_replayed_exactly_where_both_halves_are_alike():
    found = replay("run", "ssd/mini/t0/b1", rounds(CELL))
    assert found.measured == pytest.approx(9 / (0.141 + 0.101 + 0.141))
    assert found.simulated == pytest.approx(found.measured)


def test_a_half_that_is_slower_is_told_by_the_others_clock():
    slow = [("a", 2, 3, None, 100, 30), ("b", 2, 3, None, 300, 30)]
    found = replay("run", "sd/mini/t0/b1", rounds(slow, "sd"))
    assert found.simulated == pytest.approx(found.measured)  # swapped, the sum is the same
    uneven = [*slow, ("b", 2, 3, None, 300, 30)]
    found = replay("run", "sd/mini/t0/b1", rounds(uneven, "sd"))
    assert found.measured == pytest.approx(6 / (0.13 + 0.66))
    assert found.simulated == pytest.approx(6 / (0.33 + 0.26))
    assert median_error([found]) == pytest.approx(0.79 / 0.59 - 1)


def test_a_wrong_schedule_would_be_seen():
    hits = rounds(CELL)
    broken = hits.assign(cache=[None, None, "miss", "miss", "miss", "miss"])
    found = replay("run", "ssd/mini/t0/b1", broken)
    assert found.simulated == pytest.approx(found.measured)  # the mean of both kinds of rounds
    wrong = replay("run", "ar/mini/t0/b1", hits)
    assert wrong.simulated == pytest.approx(10)  # a token a verification of 100 ms
    assert wrong.difference < -0.5


@pytest.mark.parametrize(
    ("cell", "method"),
    [("ssd:new/x/t0/b1", "ssd"), ("ar@control/x/t0/b1", "ar"), ("ngram/x/t0/b1", None)],
)
def test_the_method_of_a_cell(cell, method):
    assert method_of(cell) == method
