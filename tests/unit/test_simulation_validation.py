"""Timings and replays of stored rounds, worked by hand."""

import pandas as pd
import pytest

from harness.simulation.profile import MeasuredPasses, Profile
from harness.simulation.timings import steps_of, timings
from harness.simulation.validation import (
    Replay,
    _halves,
    against_profile,
    median_error,
    median_errors,
    method_of,
    replay,
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
                "guesses": 4.0,
                "backup": None,
                "verify_ns": verify * _MS,
                "wait_ns": 0,
                "transfer_ns": 0.0,
                "speculate_ns": 0,
                "spans": [],
            }
        )
        seen[request], clock = seen.get(request, 0) + 1, end
    return pd.DataFrame(table)


def cell(requests):
    """First round: drafted in time. Then a hit that waited 1 ms, then a miss: 4 tokens at 10 ms."""
    return [
        *[(r, 3, 4, None, 100, 41) for r in requests],
        *[(r, 5, 4, "hit", 100, 1) for r in requests],
        *[(r, 1, 4, "miss", 100, 41) for r in requests],
    ]


CELL = cell("ab")
MANY = "abcdefgh"  # requests, so that both halves have rounds of each kind


def told(method, rows):
    return timings(method, steps_of(method, rows))


def test_timings_by_hand():
    found = told("ssd", rounds(CELL))
    assert found.transfer_s == pytest.approx(1e-3)
    assert found.draft_idle.times.seconds == pytest.approx((10e-3,))
    assert found.verify_idle.times.tokens == (5,)
    assert found.verify_idle.times.seconds == pytest.approx((0.1,))


def test_a_fast_backup_is_not_waited_for():
    rows = rounds(CELL).assign(backup=[None] * 4 + ["fast"] * 2)
    found = told("ssd", rows)
    assert found.transfer_s == pytest.approx((2 * 1 + 2 * 41) / 4 * 1e-3)


def test_a_rare_size_does_not_lift_the_larger_ones():
    many = [("a", 1, 6, None, 100, 0)] * 98
    found = told("ssd", rounds([("a", 1, 4, None, 200, 0), ("a", 1, 2, None, 50, 0), *many]))
    # 5 tokens cost more than 7: pooled, (200 + 98 * 100) / 99.
    assert found.verify_idle.times.seconds == pytest.approx((0.05, 10 / 99, 10 / 99))


def shared(rows, method):
    """Steps of two sequences: (item, step, (emitted, drafted) of each, verify ms, other ms)."""
    table = []
    for item, step, sequences, verify, other in rows:
        for request, (emitted, drafted) in sequences.items():
            table.append(
                {
                    "item": f"{method}/mini/t0/b2/r0/k{item}",
                    "request_id": f"{item}{request}",
                    "step": step,
                    "round": step,
                    "start_ns": 1000 * _MS * step,
                    "end_ns": (1000 * step + verify + other) * _MS,
                    "live": len(sequences),
                    "emitted": emitted,
                    "drafted": drafted,
                    "accepted": emitted - 1,
                    "cache": None,
                    "rank": None,
                    "guesses": None,
                    "backup": None,
                    "verify_ns": verify * _MS,
                    "wait_ns": 0,
                    "transfer_ns": 0.0,
                    "speculate_ns": 0,
                    "spans": [],
                }
            )
    return pd.DataFrame(table)


BATCH = [
    # Two sequences: 7 tokens; then one of them, with 3. Drafting: 4 passes for two, 2 for one.
    *[(item, 0, {"a": (3, 4), "b": (1, 1)}, 100, 40) for item in "0123456"],
    *[(item, 1, {"a": (2, 2)}, 80, 12) for item in "0123456"],
]


def test_sequences_that_share_a_step_share_its_time():
    found = told("sd", shared(BATCH, "sd"))
    verify, draft = found.verify_idle.times, found.draft_idle.times
    assert (verify.tokens, draft.tokens) == ((3, 7), (1, 2))
    assert verify.seconds == pytest.approx((0.08, 0.1))
    assert draft.seconds == pytest.approx((6e-3, 10e-3))


@pytest.mark.parametrize("method", ["sd", "tree", "ngram"])
def test_a_batch_is_replayed_item_by_item(method):
    found = replay("run", f"{method}/mini/t0/b2", shared(BATCH, method))
    assert found.measured == pytest.approx(6 / (0.14 + 0.092))
    assert found.simulated == pytest.approx(found.measured)


def test_each_half_is_told_by_the_others_clock():
    rows = [(request, 3, 4, None, 100, 40) for request in "ab" for _ in range(4)]
    table = rounds(rows, "sd")
    half = _halves(table)
    assert sorted(half) == [False] * 4 + [True] * 4
    table["verify_ns"] += 60 * _MS * half
    table["end_ns"] = table["start_ns"] + table["verify_ns"] + 40 * _MS
    found = replay("run", "sd/mini/t0/b1", table)
    # By the other half all eight steps are told 140 ms each; four of those are its own.
    assert found.differences == pytest.approx((200 / 140 - 1, 140 / 200 - 1))
    assert found.error == pytest.approx((60 / 140 + 60 / 200) / 2)
    assert (found.simulated, found.measured) == pytest.approx((24 / 1.36, 24 / 1.36))


def test_sequences_of_a_step_are_in_the_same_half():
    table = shared([("0", step, {"a": (1, 1), "b": (1, 1)}, 9, 1) for step in range(9)], "sd")
    by_step = _halves(table).groupby(table["step"])
    assert by_step.nunique().max() == 1
    assert by_step.first().sum() == 5


def chains(method, rows):
    """Rows as of `rounds`, six requests alike; the draft's passes took 20 ms, as many as told."""
    span = {"kind": "speculate", "start_ns": 0, "end_ns": 20 * _MS}
    table = rounds([(request, *row[:-1]) for request in "abcdef" for row in rows], method)
    passes = [row[-1] for row in rows] * 6
    return table.assign(
        speculate_ns=[20 * _MS * count for count in passes],
        spans=[[span] * count for count in passes],
    )


def test_amusd_is_told_by_its_text_and_its_passes():
    # A pass over 2 or 3 tokens of 100 ms holds five of the draft's; at most 2 are fed. One wait of
    # a pass for the first token. It and the next one accepted; three; then a rejection at once.
    rows = [(2, 2, None, 100, 20, 1), (3, 3, None, 100, 0, 5), (1, 3, None, 100, 0, 5)]
    table = chains("amusd", rows).assign(accepted=[2, 3, 0] * 6, wait_ns=[20 * _MS, 0, 0] * 6)
    found = replay("run", "amusd/mini/t0/b1", table, {"max_verified": 2})
    assert found.measured == pytest.approx(6 / 0.32)
    assert found.simulated == pytest.approx(found.measured)
    # Were three fed, the second round would be the last: three own tokens and the correction.
    longer = replay("run", "amusd/mini/t0/b1", table, {"max_verified": 3})
    assert longer.simulated == pytest.approx(6 / 0.22)


def test_waits_of_amusd_are_for_one_pass_or_one_and_a_half():
    rows = [(1, 2, None, 100, 10, 5), (1, 2, None, 100, 18, 5), (1, 2, None, 100, 1, 5)]
    table = chains("amusd", rows).assign(wait_ns=[10 * _MS, 18 * _MS, _MS] * 6)
    found = told("amusd", table)
    assert found.draft_loaded.times.seconds == pytest.approx((20e-3,))  # as the draft told
    assert found.draft_idle.times.seconds == pytest.approx((28e-3 / 2.5,))


def test_pearl_is_told_by_its_text_and_its_usual_block():
    # Passes of 100 and 20 ms, blocks of 5. First token; five of five; rejected at the second.
    rows = [(1, 1, None, 100, 0, 1), (5, 5, None, 100, 0, 5), (2, 5, None, 100, 0, 5)]
    table = chains("pearl", rows)
    table["accepted"] = [1, 5, 1] * 6
    found = replay("run", "pearl/mini/t0/b1", table, {"lookahead": "auto"})
    assert found.measured == pytest.approx(8 / 0.3)
    assert found.simulated == pytest.approx(found.measured)
    # Blocks of 2 (own: first, 2, 2, then one and a rejection) are five rounds.
    short = replay("run", "pearl/mini/t0/b1", table, {"lookahead": 2})
    assert short.simulated == pytest.approx(8 / 0.5)


def test_a_cell_is_replayed_exactly_where_both_halves_are_alike():
    found = replay("run", "ssd/mini/t0/b1", rounds(cell(MANY)))
    assert found.measured == pytest.approx(9 / (0.141 + 0.101 + 0.141))
    assert found.simulated == pytest.approx(found.measured)


def test_a_hit_beyond_the_first_guess_is_replayed_as_a_hit():
    ranked = rounds(cell(MANY)).assign(rank=[None] * 8 + [3] * 8 + [9] * 8)
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


def test_median_errors_by_method():
    replays = [
        Replay("run", cell, 9, 1.0, 1.0, (-one, one))
        for cell, one in (("ar/x", 0.1), ("sd:a/x", 0.2), ("sd:b/x", 0.3), ("sd@control/x", 0.4))
    ]
    assert median_errors(replays) == {"ar": 0.1, "sd": 0.3}
    assert median_error(replays) == 0.25


def test_a_wrong_schedule_would_be_seen():
    found = replay("run", "ar/mini/t0/b1", rounds(cell(MANY)))
    assert found.simulated == pytest.approx(10)  # a token a verification of 100 ms
    assert found.simulated < 0.5 * found.measured


@pytest.mark.parametrize(
    ("cell", "method"),
    [("ssd:new/x/t0/b1", "ssd"), ("ar@control/x/t0/b1", "ar"), ("ngram/x/t0/b1", "ngram")],
)
def test_the_method_of_a_cell(cell, method):
    assert method_of(cell) == method
