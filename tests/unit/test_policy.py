"""Each decision of the draft process, from options and observations, by hand. No clock runs."""

import pytest

from harness.decoder import CacheOutcome
from impl.ssd.budgeting import Costs, PassTimes
from impl.ssd.fan_out import geometric
from impl.ssd.options import MAX_AUTO_BUDGET, MAX_AUTO_LOOKAHEAD, SaguaroOptions
from impl.ssd.policy import Policy, Verdict
from impl.ssd.speculation import Path

FLAT = PassTimes((1,), (0.1,))
CHEAP = PassTimes((1,), (0.01,))
FREE_WIDTH = Costs(FLAT, FLAT, CHEAP)  # guesses cost nothing
CONTENDED = Costs(FLAT, PassTimes((1,), (0.3,)), CHEAP)  # a working draft costs two thirds


def policy(*, deterministic=False, **options):
    return Policy(SaguaroOptions(**options), deterministic=deterministic)


def path(*confidences):
    drafted = len(confidences)
    return Path(list(range(drafted + 1)), ahead=0, wanted=8, confidences=list(confidences))


ALL_ACCEPTED = Verdict(CacheOutcome.MISS, "neural", (0.95,) * 4, accepted=4, rank=1, missed=False)


# --- lookahead and budget ------------------------------------------------------------------------


def test_automatic_values_stand_in_until_passes_were_measured():
    planned = policy()
    planned.replan(1)
    assert (planned.lookahead, planned.budget) == (4, 8)


def test_a_plan_that_does_not_pay_ahead_has_budget_0():
    planned = policy()
    planned.take_costs(CONTENDED)
    planned.replan(1)
    assert planned.budget == 0


def test_guesses_that_cost_nothing_are_all_made():
    planned = policy()
    planned.take_costs(FREE_WIDTH)
    planned.replan(1)
    assert planned.budget == MAX_AUTO_BUDGET
    assert 1 <= planned.lookahead <= MAX_AUTO_LOOKAHEAD


def test_what_was_given_is_kept_whatever_the_plan_says():
    planned = policy(lookahead=3, budget=5)
    planned.take_costs(CONTENDED)
    planned.replan(1)
    assert (planned.lookahead, planned.budget) == (3, 5)
    planned = policy(lookahead=3)
    planned.take_costs(CONTENDED)
    planned.replan(1)
    assert (planned.lookahead, planned.budget) == (3, 0)


def test_a_deterministic_run_does_not_follow_measured_times():
    planned = policy(deterministic=True)
    planned.take_costs(CONTENDED)
    planned.replan(1)
    assert (planned.lookahead, planned.budget) == (4, 8)


# --- fan-out -------------------------------------------------------------------------------------


def test_each_fan_out_has_its_own_rule():
    confidences = [0.95, 0.55]
    chosen = {
        name: policy(
            fan_out=name, budget=6, acceptance=0.5, exponent=1.0, least_chance=0.0
        ).fan_out(CacheOutcome.HIT, confidences)
        for name in ("uniform", "geometric", "adaptive", "confidence")
    }
    assert chosen["uniform"] == (2, 2, 2)
    # P = (1/2, 1/4, 1/4), square roots .707 .5 .5: shares 2.49 1.76 1.76
    assert chosen["geometric"] == (2, 2, 2)
    assert chosen["adaptive"] == geometric(6, 2, 0.75, 1.0)  # the priors of a and r
    assert chosen["confidence"] == (0, 3, 3)  # see test_confidence


def test_hopeless_guesses_are_left_out_by_confidence():
    thrifty = policy(fan_out="confidence", budget=6, least_chance=0.05)
    assert thrifty.fan_out(None, [0.95, 0.55]) == (0, 2, 2)


# --- the backup ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["neural", "fast"])
def test_a_fixed_fallback_is_kept(name):
    assert {policy(fallback=name).backup(size) for size in (1, 64)} == {name}


def test_the_adaptive_fallback_follows_the_batch_size_but_never_in_a_deterministic_run():
    adaptive = policy(fallback="adaptive")
    assert 1 < adaptive.critical_batch_size < 2  # by the priors; see test_fallback
    assert (adaptive.backup(1), adaptive.backup(2)) == ("neural", "fast")
    assert policy(fallback="adaptive", deterministic=True).backup(64) == "neural"


def test_backup_times_are_told_in_verifications():
    slow = policy(fallback="adaptive")
    slow.observe_backup(9.0)  # before any verification there is no unit to tell it in
    assert slow.backup(1) == "neural"
    slow.observe_verification(0.1)
    for _ in range(60):
        slow.observe_backup(0.2)  # T_b 2: the model loses even alone
    assert slow.backup(1) == "fast"


# --- returning short -----------------------------------------------------------------------------


def test_a_token_is_worth_its_pass_while_it_brings_more_than_the_run_does():
    judging = policy(return_short=True)
    judging.observe_verification(0.1)
    # Reached with .95 * .95, accepted with .75 (the prior): .676875 tokens for the pass; the run
    # makes 3 tokens a verification, 30 a second: worth 22.5625 ms.
    assert judging.worth_extending(path(0.95, 0.95), pass_s=0.0225)
    assert not judging.worth_extending(path(0.95, 0.95), pass_s=0.0226)
    assert not judging.worth_extending(path(0.95, 0.35), pass_s=0.0225)
    assert judging.worth_extending(path(), pass_s=0.0249)
    assert not judging.worth_extending(path(), pass_s=0.0251)


def test_what_a_token_is_worth_is_learned():
    judging = policy(return_short=True)
    judging.observe_verification(0.1)
    judging.observe(ALL_ACCEPTED)
    # a = (10 * .75 + 4) / 14; the bin of .95 has (3.8 + 4) / 8 = .975; 3 + .1 * (5 - 3) tokens
    worth = 0.975 * (11.5 / 14) * 0.1 / 3.2
    assert judging.worth_extending(path(0.95), pass_s=0.999 * worth)
    assert not judging.worth_extending(path(0.95), pass_s=1.001 * worth)


def test_the_time_of_a_verification_is_a_running_mean():
    judging = policy(return_short=True)
    judging.observe_verification(0.1)
    judging.observe_verification(0.2)  # .1 + .1 * (.2 - .1) = .11
    worth = 0.95 * 0.75 * 0.11 / 3
    assert judging.worth_extending(path(0.95), pass_s=0.999 * worth)
    assert not judging.worth_extending(path(0.95), pass_s=1.001 * worth)


@pytest.mark.parametrize(
    "judging",
    [policy(return_short=False), policy(return_short=True, deterministic=True)],
    ids=["switched off", "deterministic"],
)
def test_otherwise_a_speculation_is_always_completed(judging):
    judging.observe_verification(1e-9)
    assert judging.worth_extending(path(0.01), pass_s=1e9)


def test_before_any_verification_was_timed_a_speculation_is_completed():
    assert policy(return_short=True).worth_extending(path(0.01), pass_s=1e9)
