"""Pass times by hand; the plan against every (K, B) computed anew; budget 0 where it must be."""

import pytest

from impl.ssd.budgeting import BUDGETS, Costs, PassTimes, plan
from impl.ssd.fan_out import OutcomeEstimate, geometric

GOOD, BAD = OutcomeEstimate(0.85, 1.2), OutcomeEstimate(0.6, 0.7)


def test_pass_times_between_and_beyond_what_was_measured():
    times = PassTimes.of({8: 3.0, 2: 1.0, 4: 2.0})
    assert times.tokens == (2, 4, 8)
    # 0.5 a token up to 4, 0.25 from there
    for tokens, seconds in ((2, 1.0), (3, 1.5), (4, 2.0), (6, 2.5), (8, 3.0), (12, 4.0), (1, 0.5)):
        assert times.at(tokens) == pytest.approx(seconds)
    assert PassTimes.of({5: 0.7}).at(99) == 0.7


def linear(base, slope):
    return PassTimes((1, 101), (base, base + 100 * slope))


COSTS = Costs(linear(0.100, 0.006), linear(0.115, 0.007), linear(0.017, 0.002))


def tokens_per_s(costs, after_hit, after_miss, batch, lookahead, budget):
    """DESIGN section 4, written out."""
    idle, loaded = (c.at(batch * (lookahead + 1)) for c in (costs.verify_idle, costs.verify_loaded))
    build = (lookahead + 1) * costs.draft.at(batch * budget) if budget else 0.0
    verify = idle + (loaded - idle) * min(1.0, build / loaded)  # slower while the build lasts
    rates = []
    for state in (after_hit, after_miss):
        a, r = state.acceptance, state.exponent
        fan_out = geometric(budget, lookahead, a, r)
        ends = [a**k * (1 - a) for k in range(lookahead)] + [a**lookahead]
        rates.append(sum(p * (1 - (1 + f) ** -r) for p, f in zip(ends, fan_out, strict=True)))
    h = rates[1] / (1 - rates[0] + rates[1]) if rates[1] else 0.0
    e_hit, e_miss = (
        (1 - s.acceptance ** (lookahead + 1)) / (1 - s.acceptance) for s in (after_hit, after_miss)
    )
    together = h**batch
    stalled = verify + lookahead * costs.draft.at(batch)
    time = together * max(verify, build) + (1 - together) * stalled
    return (h * e_hit + (1 - h) * e_miss) / time


def test_a_verification_is_slow_for_as_long_as_the_build_lasts():
    costs = Costs(linear(0.1, 0.0), linear(0.2, 0.0), linear(0.01, 0.0))
    # a build of 0.05 s takes a quarter of a loaded pass
    for build_s, seconds in ((0.0, 0.1), (0.05, 0.125), (0.2, 0.2), (9.0, 0.2)):
        assert costs.verify_beside(build_s, tokens=5) == pytest.approx(seconds)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("after_hit", "after_miss"), [(GOOD, BAD), (BAD, BAD), (GOOD, GOOD)])
def test_the_plan_is_the_fastest_of_all(after_hit, after_miss, batch):
    speeds = {
        (k, b): tokens_per_s(COSTS, after_hit, after_miss, batch, k, b)
        for k in range(1, 9)
        for b in BUDGETS
        if b <= 16
    }
    chosen = plan(COSTS, after_hit, after_miss, batch, max_lookahead=8, max_budget=16)
    best = max(speeds, key=speeds.__getitem__)
    assert (chosen.lookahead, chosen.budget) == best
    assert chosen.tokens_per_s == pytest.approx(speeds[best])


def test_the_plan_stays_within_what_it_may_choose():
    chosen = plan(COSTS, GOOD, GOOD, 1, max_lookahead=2, max_budget=3)
    assert chosen.lookahead <= 2
    assert chosen.budget in (0, 2)


@pytest.mark.parametrize(
    "costs",
    [
        # the target all but stops while the draft works, and a pass for guesses is the dearer one
        Costs(linear(0.1, 0.0), linear(1.0, 0.0), linear(0.02, 0.002)),
        # a branch costs as much as a verification
        Costs(linear(0.1, 0.0), linear(0.1, 0.0), linear(0.01, 0.1)),
    ],
    ids=["contention", "dear branches"],
)
def test_nothing_is_speculated_ahead_where_it_does_not_pay(costs):
    assert plan(costs, GOOD, GOOD, 1, max_lookahead=8, max_budget=16).budget == 0


def test_with_a_draft_that_costs_nothing_to_widen_the_budget_is_spent():
    costs = Costs(linear(0.1, 0.0), linear(0.1, 0.0), linear(0.01, 0.0))
    assert plan(costs, GOOD, GOOD, 1, max_lookahead=8, max_budget=16).budget == 16
