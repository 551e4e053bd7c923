"""Fan-out: exact budgets, the closed form against brute force, and recovery of a and r."""

from itertools import product

import numpy as np
import pytest

from harness.decoder import CacheOutcome
from impl.ssd.fan_out import (
    AdaptiveFanOut,
    OutcomePrior,
    geometric,
    miss_probability,
    outcome_probabilities,
    uniform,
)

ACCEPTANCES = [0.0, 0.05, 0.5, 0.8, 0.99, 1.0]


def test_outcome_probabilities_by_hand():
    assert outcome_probabilities(0.5, 3) == (0.5, 0.25, 0.125, 0.125)
    assert outcome_probabilities(0.0, 2) == (1, 0, 0)
    assert outcome_probabilities(1.0, 2) == (0, 0, 1)
    assert outcome_probabilities(0.9, 0) == (1,)


def test_miss_probability_by_hand():
    assert miss_probability(0, 0.7) == 1
    assert miss_probability(3, 1.0) == 0.25
    assert miss_probability(3, 0.5) == 0.5


def test_uniform_by_hand():
    assert uniform(8, 3) == (2, 2, 2, 2)
    assert uniform(10, 3) == (3, 3, 2, 2)
    assert uniform(2, 3) == (1, 1, 0, 0)
    assert uniform(0, 3) == (0, 0, 0, 0)


def test_geometric_by_hand():
    # a = 1/2, r = 1: F_k / F_0 = 2^(-k/2), and F_3 / F_0 = 2^(-3/2) * 2^(1/2) = 1/2.
    # 100 / (1 + .7071 + .5 + .5) = 36.94: shares 36.94, 26.12, 18.47, 18.47.
    assert geometric(100, 3, 0.5, 1.0) == (37, 26, 19, 18)
    # a = 1/4, r = 1: F_1 / F_0 = 4^(-1/2) * (3/4)^(-1/2) = .57735: shares 6.34, 3.66.
    assert geometric(10, 1, 0.25, 1.0) == (6, 4)


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 8, 64])
@pytest.mark.parametrize("lookahead", [0, 1, 3, 8])
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_the_budget_is_used_exactly_and_earlier_positions_get_no_less(
    budget, lookahead, acceptance
):
    for exponent in (0.0, 0.3, 1.0, 3.0):
        fan_out = geometric(budget, lookahead, acceptance, exponent)
        assert len(fan_out) == lookahead + 1
        assert sum(fan_out) == budget
        assert min(fan_out) >= 0
        assert list(fan_out[:-1]) == sorted(fan_out[:-1], reverse=True)


def test_certain_outcomes_take_the_whole_budget():
    assert geometric(9, 3, 0.0, 1.0) == (9, 0, 0, 0)
    assert geometric(9, 3, 1.0, 1.0) == (0, 0, 0, 9)


def test_the_last_position_gets_more_than_its_neighbour_when_acceptance_is_high():
    fan_out = geometric(32, 4, 0.9, 1.0)
    assert fan_out[4] > fan_out[3]
    low = geometric(32, 4, 0.3, 1.0)  # P(4) = .3^4 < P(3) = .3^3 * .7
    assert low[4] <= low[3]


def cost(fan_out, acceptance, exponent):
    """DESIGN section 4's objective, with a miss for sure where nothing is guessed."""
    weights = outcome_probabilities(acceptance, len(fan_out) - 1)
    return sum(
        weight * (guesses**-exponent if guesses else 1.0)
        for weight, guesses in zip(weights, fan_out, strict=True)
    )


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_close_to_the_brute_force_minimum(lookahead, acceptance, exponent):
    budget = 24
    compositions = (
        (*head, budget - sum(head))
        for head in product(range(budget + 1), repeat=lookahead)
        if sum(head) <= budget
    )
    best = min(compositions, key=lambda fan_out: cost(fan_out, acceptance, exponent))
    closed = geometric(budget, lookahead, acceptance, exponent)

    # Rounding the real optimum moves each entry by at most one guess from the integer optimum.
    assert max(abs(a - b) for a, b in zip(best, closed, strict=True)) <= 1
    assert cost(closed, acceptance, exponent) <= 1.02 * cost(best, acceptance, exponent)


def draw_rounds(rng, acceptance, exponent, lookahead, count):
    """Outcomes of the model process: (accepted, rank), ranks with P(rank > F) = (1 + F)^-r."""
    accepted = np.minimum(rng.geometric(1 - acceptance, count) - 1, lookahead)
    pareto = rng.random(count) ** (-1 / exponent)
    ranks = np.ceil(pareto) - 1
    return [(int(k), int(min(max(r, 1), 10**9))) for k, r in zip(accepted, ranks, strict=True)]


@pytest.mark.parametrize(("acceptance", "exponent"), [(0.6, 0.6), (0.85, 1.2), (0.9, 2.5)])
def test_recovers_acceptance_and_exponent(acceptance, exponent):
    adaptive = AdaptiveFanOut(max_rank=32)
    rounds = draw_rounds(np.random.default_rng(0), acceptance, exponent, 5, 4000)
    for accepted, rank in rounds:
        adaptive.observe(CacheOutcome.HIT, accepted, 5, rank if rank <= 1000 else None)
    estimate = adaptive.estimate(CacheOutcome.HIT)

    # Standard errors near .004 and 2% of r at 4000 rounds; four of them.
    assert estimate.acceptance == pytest.approx(acceptance, abs=0.016)
    assert estimate.exponent == pytest.approx(exponent, rel=0.08)


def test_prior_alone_then_one_observation_by_hand():
    adaptive = AdaptiveFanOut(OutcomePrior(acceptance=0.6, exponent=0.9, strength=10))
    assert adaptive.estimate(None).acceptance == pytest.approx(0.6)
    assert adaptive.estimate(None).exponent == pytest.approx(0.9, rel=1e-3)

    adaptive.observe(None, accepted=2, lookahead=4, rank=1)  # two accepted, one rejected
    assert adaptive.estimate(None).acceptance == pytest.approx((6 + 2) / (10 + 3))
    adaptive.observe(None, accepted=4, lookahead=4, rank=1)  # four accepted, none rejected
    assert adaptive.estimate(None).acceptance == pytest.approx((6 + 6) / (10 + 7))


def test_exponent_with_censored_ranks_by_hand():
    # Three ranks beyond 7: the likelihood is 8^(-3r), the prior r^10 exp(-10 r / r0) with r0 = 1:
    # the mode is 10 / (10 + 3 log 8).
    adaptive = AdaptiveFanOut(OutcomePrior(exponent=1.0, strength=10), max_rank=7)
    for rank in (None, 8, 1000):
        adaptive.observe(CacheOutcome.MISS, 0, 1, rank)
    expected = 10 / (10 + 3 * np.log(8))
    assert adaptive.estimate(CacheOutcome.MISS).exponent == pytest.approx(expected, rel=1e-3)


def test_hits_and_misses_are_learnt_apart_and_a_first_round_counts_as_a_miss():
    adaptive = AdaptiveFanOut()
    for _ in range(200):
        adaptive.observe(CacheOutcome.HIT, 4, 4, 1)
        adaptive.observe(None, 0, 4, 50)
    hit, miss = adaptive.estimate(CacheOutcome.HIT), adaptive.estimate(CacheOutcome.MISS)

    assert hit.acceptance > 0.95 > 0.1 > miss.acceptance
    assert hit.exponent > 2 > 0.5 > miss.exponent
    assert adaptive.estimate(None) == miss
    assert adaptive.allocate(CacheOutcome.HIT, 8, 3)[3] > adaptive.allocate(None, 8, 3)[3]
    assert sum(adaptive.allocate(None, 8, 3)) == 8
