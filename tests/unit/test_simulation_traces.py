"""Recorded rounds laid out along the text, and replayed by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from harness.simulation.profile import MeasuredPasses, Profile
from harness.simulation.scenario import Scenario, mean_rate
from harness.simulation.simulate import simulate
from harness.simulation.traces import Trace, TracedOutcomes, trace_of
from impl.ssd.budgeting import PassTimes
from impl.ssd.fan_out import geometric, uniform

NAN, INF = math.nan, math.inf

# One request: two drafted tokens and the fourth-best bonus token; a rejection, made up by the first
# guess left; one accepted, and the second guess left. Along the text: own own 4 | 2 | own 3.
ROUNDS = [(0, 2, 2, 4), (0, 2, 0, 1), (0, 2, 1, 2)]


def trace(rounds, **changes):
    """Of (request, drafted, accepted, rank); each emits one token more than were accepted."""
    request, drafted, accepted, ranks = map(np.array, zip(*rounds, strict=True))
    rounds = Trace(request, accepted + 1, drafted, accepted, ranks.astype(float), request >= 0)
    return rounds if not changes else Trace(**{**vars(rounds), **changes})


def scenario(method, recorded, lookahead=2, batch_size=1, budget=6):
    target, draft = (MeasuredPasses(PassTimes((1,), (s,))) for s in (1.0, 0.1))
    profile = Profile("flat", "measured", 1, 1, target, target, draft, draft, 0.0)
    return Scenario(
        method, profile, recorded, lookahead, batch_size, budget=budget, fan_out="uniform"
    )


def walk(recorded, lookahead, guesses):
    """(accepted, whether the cache missed) of each round of the first request, batch size 1."""
    outcomes = TracedOutcomes(recorded, 1, 1, None, seed=0)
    (left,) = outcomes.admit(np.array([[True]]))[0]
    found = []
    while left > 0:
        accepted = np.minimum(outcomes.accepted(0), lookahead)
        missed = outcomes.beyond(0, accepted, np.array([[lookahead]]), np.array([[guesses]]))
        found.append((int(accepted[0, 0]), bool(missed[0, 0])))
        outcomes.advance(accepted + 1)
        left -= accepted[0, 0] + 1
    return found


@pytest.mark.parametrize(
    ("guesses", "missed"),
    [(1, [True, False, True]), (2, [True, False, False]), (4, [False, False, False])],
)
def test_any_fan_out_is_replayed_at_the_recorded_lookahead(guesses, missed):
    assert walk(trace(ROUNDS), 2, guesses) == list(zip([2, 0, 1], missed, strict=True))


def test_a_shorter_draft_ends_in_the_drafts_own_token_or_in_the_recorded_one():
    # own (own) | 4: rejected, so third of those left | 2: first left | own (3): third of all
    assert walk(trace(ROUNDS), 1, 2) == [(1, False), (0, True), (0, False), (1, True)]
    assert walk(trace(ROUNDS), 1, 3) == [(1, False), (0, False), (0, False), (1, False)]


def test_a_longer_draft_is_rejected_where_the_bonus_token_was_not_the_drafts():
    assert walk(trace(ROUNDS), 3, 2) == [(2, True), (0, False), (1, False)]
    assert walk(trace([(0, 2, 2, 1), (0, 2, 2, 1)]), 9, 1) == [(6, False)]  # all its own


def test_an_unknown_bonus_token_is_the_drafts_own_at_the_rate_of_the_trace():
    # Of 5 judged tokens 4 were accepted: 1000 rounds of one drafted, four in five accepted.
    rounds = trace([(0, 1, int(i % 5 > 0), NAN) for i in range(1000)])
    assert rounds.rate == pytest.approx(0.8)
    # A draft that never ends: the mean run of own tokens is a / (1 - a) = 4, both kinds alike.
    counts = [accepted for accepted, _ in walk(rounds, 1000, 0)]
    assert np.mean(counts) == pytest.approx(4, rel=0.1)


def test_ssd_replays_each_request_from_a_first_round_that_drafts():
    # 12 guesses at 3 positions: 4 each. First rounds draft (1.2 s), the other two hit (1 s).
    found = simulate([scenario("ssd", trace(ROUNDS), budget=12)], rounds=30)[0]
    assert found.hit_rate == 1.0
    assert found.tokens_per_s == pytest.approx(6 / (1.2 + 2 * 1.0))
    # One each: the rank 4 misses, the rank 1 hits.
    found = simulate([scenario("ssd", trace(ROUNDS), budget=3)], rounds=30)[0]
    assert found.hit_rate == 0.5
    assert found.tokens_per_s == pytest.approx(6 / (1.2 + 1.2 + 1.0))
    assert uniform(3, 2) == (1, 1, 1)


def test_slots_share_a_queue_of_requests_and_empty_at_its_end():
    # Tokens 1, 3 and 2, one a round: the third request follows the first; round 3 is the second's
    # and the third's. 3 rounds, 2 sequences in each.
    rounds = [(request, 0, 0, NAN) for request, count in enumerate((1, 3, 2)) for _ in range(count)]
    found = simulate([scenario("ar", trace(rounds), batch_size=2)], rounds=None)[0]
    assert found.tokens_per_s == pytest.approx(6 / 3)
    alone = simulate([scenario("ar", trace(rounds), batch_size=3)], rounds=None)[0]
    assert alone.tokens_per_s == pytest.approx(6 / 3)  # 3, 2 and 1 live
    assert alone.acceptance_length == 1.0


def test_rounds_as_recorded_follow_no_lookahead():
    recorded = trace([(0, 4, 3, NAN), (0, 1, 0, NAN)], as_recorded=True)
    found = simulate([scenario("sd", recorded, lookahead=9)], rounds=None)[0]
    assert found.tokens_per_s == pytest.approx(5 / (1 + 0.4 + 1 + 0.1))
    hits = trace(
        [(0, 4, 3, NAN), (0, 1, 0, NAN)], as_recorded=True, awaited=np.array([True, False])
    )
    found = simulate([scenario("ssd", hits, lookahead=9, budget=10)], rounds=None)[0]
    assert found.tokens_per_s == pytest.approx(5 / (1.4 + 1.0))


def test_a_trace_has_a_geometric_fan_out_of_its_own_rate_and_exponent():
    recorded = trace([(0, 2, 2, 1), (0, 2, 0, 1), (0, 2, 1, 2)] * 300)
    assert recorded.rate == pytest.approx(3 / 5)  # 2 of 2, 0 of 1, 1 of 2
    # Ranks 1, 1, 2 under P(R > F) = (1 + F)^-r: 2 / 3 at 1, 1 / 3 at 2. The likelihood's slope by
    # hand: 2 log(2) / (2^r - 1) + log(3/2) / ((3/2)^r - 1) = log 2, near r = 2.15.
    r = recorded.estimate.exponent
    slope = 2 * math.log(2) / (2**r - 1) + math.log(1.5) / (1.5**r - 1) - math.log(2)
    assert slope == pytest.approx(0, abs=0.02)
    one = Scenario("ssd", scenario("ar", recorded).profile, recorded, 2, budget=9)
    assert one.guesses() == geometric(9, 2, mean_rate(recorded.estimate, 2), r)


def rows(*rounds):
    """Of rounds.parquet: (item, request, round, step, emitted, drafted, accepted, cache, rank)."""
    names = (
        "item",
        "request_id",
        "round",
        "step",
        "emitted",
        "drafted",
        "accepted",
        "cache",
        "rank",
    )
    return pd.DataFrame(rounds, columns=names).assign(backup=None, guesses=4)


def test_the_outcome_is_told_by_the_round_after_it():
    found = trace_of(
        rows(
            ("i", "a", 0, 0, 3, 4, 2, None, None),
            ("i", "a", 1, 1, 5, 4, 4, "hit", 3),
            ("i", "a", 2, 2, 1, 4, 0, "miss", None),
            ("i", "a", 3, 3, 2, 4, 1, "hit", None),
        )
    )
    np.testing.assert_array_equal(found.ranks, [3, INF, 1, NAN])  # rank, no guess, hit, the end
    assert found.awaited.tolist() == [True, False, True, False]


def test_requests_are_in_the_order_in_which_they_began():
    found = trace_of(
        rows(
            ("i", "a", 0, 4, 1, 0, 0, None, None),
            ("i", "b", 0, 0, 2, 0, 0, None, None),
            ("i", "b", 1, 1, 3, 0, 0, None, None),
        )
    )
    assert found.request.tolist() == [0, 0, 1]
    assert found.emitted.tolist() == [2, 3, 1]


def test_a_miss_of_no_guesses_tells_nothing():
    empty = rows(("i", "a", 0, 0, 3, 4, 2, None, None), ("i", "a", 1, 1, 1, 4, 0, "miss", None))
    assert np.isnan(trace_of(empty.assign(guesses=0)).ranks).all()
