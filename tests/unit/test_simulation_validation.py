"""Timings and replays of stored rounds, worked by hand."""

import pandas as pd
import pytest

from harness.simulation.acceptance import trace_of
from harness.simulation.profile import MeasuredPasses, Profile
from harness.simulation.validation import (
    against_profile,
    median_error,
    method_of,
    replay,
    timings,
)
from impl.ssd.budgeting import PassTimes

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


def test_a_hit_beyond_the_first_guess_is_replayed_as_a_hit():
    ranked = rounds(CELL).assign(rank=[None, None, 3, 3, 9, 9])
    found = replay("run", "ssd/mini/t0/b1", ranked)
    assert found.simulated == pytest.approx(found.measured)


def test_an_emulated_cell_is_told_by_its_profile_alone():
    passes = [MeasuredPasses(PassTimes((1, 2), (s, s + e))) for s, e in ((0.1, 0.0), (0.01, 0.01))]
    profile = Profile("p", "measured", 1, 1, passes[0], passes[0], passes[1], passes[1], 0.002)
    found = against_profile("run", "ssd/mini/t0/b1", rounds(CELL), profile, {"budget": 8})
    # First and miss: 0.1 + 4 * 0.01. Hit: its build, 0.01 and four passes of 8 rows (0.08 each),
    # outlasts the verification. A transfer each.
    assert found.simulated == pytest.approx(9 / (0.14 + 0.33 + 0.14 + 3 * 0.002))
    assert found.measured == pytest.approx(9 / 0.383)
    auto = against_profile("run", "ssd/mini/t0/b1", rounds(CELL), profile, {"budget": "auto"})
    assert auto.simulated == pytest.approx(9 / (0.14 + 0.21 + 0.14 + 3 * 0.002))  # 5 rows


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
