"""Schedules against the closed forms of `impl.ssd.theory` and against rounds worked by hand."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from harness.errors import UsageError
from harness.simulation.acceptance import Acceptance, SampledOutcomes
from harness.simulation.profile import MeasuredPasses, Profile
from harness.simulation.scenario import Scenario, mean_rate
from harness.simulation.schedules import build_seconds, speed_inputs, uses_fast_backup
from harness.simulation.simulate import fastest, simulate
from impl.ssd.budgeting import PassTimes
from impl.ssd.theory import Backup, critical_batch_size, expected_tokens, hit_rate, predict

LONG = 10**9  # output tokens: no sequence ends


def profile(verify=1.0, draft=0.1, transfer=0.0):
    """Passes that cost the same at any size."""
    target, drafter = (MeasuredPasses(PassTimes((1,), (s,))) for s in (verify, draft))
    return Profile("flat", "measured", 4, 1, target, target, drafter, drafter, transfer)


def scenario(method, acceptance=0.8, lookahead=4, **changes):
    if isinstance(acceptance, float):
        acceptance = Acceptance((acceptance,), 1.0)
    given = {"profile": profile(), "output_tokens": LONG} | changes
    return Scenario(method, acceptance=acceptance, lookahead=lookahead, **given)


def run(one, rounds=6_000, seed=0):
    return simulate([one], rounds, seed)[0]


def test_autoregressive_is_one_token_a_pass():
    found = run(scenario("ar", batch_size=3), rounds=10)
    assert found.tokens_per_s == pytest.approx(3.0)
    assert found.acceptance_length == 1
    assert found.tokens_per_s_per_device == pytest.approx(3 / 4)
    assert found.label == "simulated"


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_speculative_decoding_is_the_closed_form(acceptance):
    found = run(scenario("sd", acceptance))
    expected = expected_tokens(acceptance, 4) / (1 + 4 * 0.1)
    assert found.tokens_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("acceptance", "exponent"), [(0.6, 1.0), (0.85, 2.0)])
@pytest.mark.parametrize("draft", [0.1, 0.3])  # built in time; outlasting the verification
def test_ssd_is_the_closed_form(acceptance, exponent, batch_size, draft):
    one = scenario(
        "ssd",
        Acceptance((acceptance,), exponent),
        profile=profile(draft=draft),
        batch_size=batch_size,
        budget=8,
    )
    found, expected = run(one), predict(speed_inputs(one))
    rate = hit_rate(acceptance, exponent, one.guesses())
    assert found.hit_rate == pytest.approx(rate, abs=0.02)
    assert found.stall_rate == pytest.approx(1 - rate**batch_size, abs=0.025)
    assert found.tokens_per_s == pytest.approx(batch_size * expected.speed, rel=0.03)


def test_speed_inputs_by_hand():
    inputs = speed_inputs(scenario("ssd", profile=profile(draft=0.3)))
    assert inputs.build_time == pytest.approx(5 * 0.3)  # one pass ranks the guesses, four draft
    assert inputs.backup.time == pytest.approx(4 * 0.3)
    assert inputs.tokens_on_hit == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)


def test_ssd_without_a_budget_is_speculative_decoding():
    without, plain = (run(scenario(m, budget=0)) for m in ("ssd", "sd"))
    assert without.hit_rate == 0
    assert without.tokens_per_s == pytest.approx(plain.tokens_per_s)


def test_the_fast_fallback_is_the_closed_form():
    one = scenario("ssd", fallback="fast", budget=5, fast_acceptance=0.4, fast_lookahead=2)
    inputs = replace(speed_inputs(one), backup=Backup(1 + 0.4 + 0.16, 0.0))
    found = run(one)
    assert found.tokens_per_s == pytest.approx(predict(inputs).speed, rel=0.03)


def test_the_adaptive_fallback_turns_at_the_critical_batch_size():
    one = scenario("ssd", 0.8, 8, fallback="adaptive", profile=profile(draft=0.05))
    fast = Backup(expected_tokens(one.fast_acceptance, one.fast_lookahead), 0.0)
    critical = critical_batch_size(speed_inputs(one), fast)
    assert 1 < critical < math.inf
    assert not uses_fast_backup(replace(one, batch_size=math.ceil(critical) - 1))
    assert uses_fast_backup(replace(one, batch_size=math.ceil(critical)))


def test_a_transfer_is_paid_once_a_round_of_ssd():
    times = [
        run(scenario("ssd", profile=profile(transfer=t)), rounds=200).round_ms for t in (0.0, 0.05)
    ]
    assert times[1] - times[0] == pytest.approx(50)


def test_a_tree_takes_one_token_more_where_a_sibling_was_right():
    # K = 1, width 2: accepted (a) brings 2 tokens; else the sibling is right with 1 - 1/2.
    found = run(scenario("tree", 0.6, 1, width=2))
    assert found.acceptance_length == pytest.approx(2 * 0.6 + 0.4 * (0.5 * 2 + 0.5 * 1), rel=0.03)
    assert found.round_ms == pytest.approx(1100)
    plain = run(scenario("tree", 0.6, 1, width=1))
    assert plain.acceptance_length == pytest.approx(1.6, rel=0.03)


def test_a_draft_that_always_agrees_keeps_amusd_verifying():
    # Ten draft passes fit in a verification: K + 1 tokens each, after one wait for the first token.
    found = run(scenario("amusd", 1.0, 4), rounds=1000)
    assert found.acceptance_length == pytest.approx((2 + 999 * 5) / 1000)
    assert found.stall_rate == pytest.approx(1 / 1000)


def test_a_draft_that_never_agrees_makes_amusd_wait_each_round():
    # For a pass of 0.1 s, and but for the first time for half of the one that it was in.
    found = run(scenario("amusd", 0.0, 4), rounds=100)
    assert found.tokens_per_s == pytest.approx(100 / (1.1 + 99 * 1.15))


def test_pearl_at_its_extremes():
    # Always: the first block's first token is pre-verified; from then on it is 4 tokens a round.
    always = run(scenario("pearl", 1.0, 4), rounds=102)
    assert always.tokens_per_s == pytest.approx((1 + 4 * 101) / 102)
    assert run(scenario("pearl", 0.0, 4), rounds=50).tokens_per_s == pytest.approx(1.0)


def test_pearl_waits_for_a_block_that_outlasts_the_verification():
    slow = run(scenario("pearl", 1.0, 4, profile=profile(draft=0.5)), rounds=10)
    assert slow.round_ms == pytest.approx(1000 * (1 + 9 * 2) / 10)  # none before the first block
    # Rejected at once: a block's first token is late by half a pass, hidden behind the target's.
    never = run(scenario("pearl", 0.0, 4, profile=profile(draft=0.5)), rounds=10)
    assert never.round_ms == pytest.approx(1000)
    slower = run(scenario("pearl", 0.0, 4, profile=profile(draft=0.8)), rounds=10)
    assert slower.round_ms == pytest.approx(1000 * (1 + 9 * 1.2) / 10)  # (1/2 + 1) 0.8


def test_pearl_is_the_mean_of_its_two_states():
    # K = 2. Pre judges one token, post two; all accepted leads to post, anything else to pre.
    a = 0.5
    p = 1 / (1 + a / (1 - a * a))  # share of pre; post = a p + a a post
    tokens = p + (1 - p) * ((1 - a) * 1 + a * (1 - a) * 2 + a * a * 2)
    assert run(scenario("pearl", a, 2)).acceptance_length == pytest.approx(tokens, rel=0.03)


def test_a_sequence_is_cut_at_its_end_and_replaced():
    # All accepted, K = 4: 5 tokens a round, 7 tokens an output: rounds of 5 and 2, over and over.
    found = run(scenario("sd", 1.0, output_tokens=7), rounds=100)
    assert found.acceptance_length == pytest.approx(3.5)


def test_a_new_sequence_begins_as_after_a_miss():
    # Every output is one round: no hit is ever used, and none is counted.
    found = run(scenario("ssd", 1.0, output_tokens=3), rounds=100)
    assert found.hit_rate is None
    assert found.stall_rate == 1


def test_positions_have_rates_of_their_own():
    acceptance = Acceptance((0.5, 0.2))
    np.testing.assert_allclose(acceptance.survival(3), [0.5, 0.1, 0.02])
    found = run(scenario("sd", acceptance, 3))
    assert found.acceptance_length == pytest.approx(1.62, rel=0.03)
    assert expected_tokens(mean_rate(acceptance, 3), 3) == pytest.approx(1.62, abs=1e-6)


def test_results_follow_the_seed_alone():
    one = scenario("ssd", batch_size=2)
    beside = simulate([scenario("ssd", 0.3, 9, batch_size=5), one], 500, seed=3)[1]
    assert run(one, 500, seed=3).tokens_per_s == beside.tokens_per_s
    assert run(one, 500, seed=4).tokens_per_s != beside.tokens_per_s


def test_the_fastest_lookahead_is_that_of_the_closed_form():
    best = max(range(1, 17), key=lambda k: expected_tokens(0.8, k) / (1 + 0.1 * k))
    assert fastest(scenario("sd", 0.8)).scenario.lookahead == pytest.approx(best, abs=1)


def test_outcomes_have_the_stated_law():
    acceptance, tokens = Acceptance((0.7,), 1.5), np.array([LONG])
    outcomes = SampledOutcomes([acceptance], tokens, 3, 1, 6_000, seed=5)
    counts = np.array([outcomes.accepted(t)[0, 0] for t in range(6_000)])
    law = [0.3, 0.7 * 0.3, 0.49 * 0.3, 0.343]
    np.testing.assert_allclose(np.bincount(counts) / 6_000, law, atol=0.02)
    none = np.array([[0]])
    missed = [outcomes.beyond(t, none, none, np.array([[3]]))[0, 0] for t in range(6_000)]
    assert np.mean(missed) == pytest.approx(4**-1.5, abs=0.012)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "sdd"}, 'did you mean "sd"'),
        ({"lookahead": 0}, "--lookahead: must be at least 1"),
        ({"budget": -1}, "--budget: must be at least 0"),
    ],
)
def test_a_bad_scenario_is_named(changes, named):
    with pytest.raises(UsageError, match=named):
        scenario(**({"method": "ssd"} | changes))


@pytest.mark.parametrize("rates", [(), (1.2,), (-0.1,), (float("nan"),)])
def test_a_bad_acceptance_is_named(rates):
    with pytest.raises(UsageError, match="--acceptance"):
        Acceptance(rates)


def test_build_time_has_a_pass_of_every_branch():
    rows = MeasuredPasses(PassTimes((1, 11), (0.1, 1.1)))  # 0.1 s a row
    target = MeasuredPasses(PassTimes((1,), (1.0,)))
    machine = Profile("rows", "measured", 1, 1, target, target, rows, rows, 0.0)
    one = scenario("ssd", lookahead=2, budget=3, batch_size=2, profile=machine)
    assert build_seconds(one) == pytest.approx(0.2 + 2 * 0.6)


@pytest.mark.parametrize("rounds", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_thousand_configurations_of_ten_thousand_rounds_take_less_than_a_minute(rounds):
    grid = [
        scenario(("ar", "sd", "tree", "amusd", "pearl", "ssd")[i % 6], 0.5 + i / 2500, 1 + i % 8)
        for i in range(1000)
    ]
    begin = time.process_time()
    simulate(grid, rounds)
    assert time.process_time() - begin < 60 * rounds / 10_000
