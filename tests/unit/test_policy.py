"""Each decision of the draft process, from options and observations, by hand. No clock runs."""

import math

import pytest

from harness.decoder import CacheOutcome
from impl.ssd.budgeting import Costs, PassTimes
from impl.ssd.fan_out import geometric
from impl.ssd.options import MAX_AUTO_BUDGET, MAX_AUTO_LOOKAHEAD, SaguaroOptions
from impl.ssd.policy import Policy, Verdict
from impl.ssd.speculation import Path
from impl.ssd.speculation_cache import Outcome

HIT, MISS = CacheOutcome.HIT, CacheOutcome.MISS
VERIFY = PassTimes((1, 11), (0.100, 0.150))  # 5 ms a token
DRAFT = PassTimes((1, 11), (0.010, 0.020))
FREE = Costs(VERIFY, VERIFY, DRAFT, DRAFT)  # neither slows the other
CONTENDED = Costs(VERIFY, PassTimes((1, 11), (0.400, 0.600)), DRAFT, DRAFT)  # 3 of 4 seconds lost


def policy(*, costs=None, deterministic=False, **options):
    made = Policy(SaguaroOptions(**options), deterministic=deterministic)
    if costs is not None:
        made.take_costs(costs, batch_size=1)
    return made


def path(*, drafted=0, reach=1.0, chance=1.0):
    return Path([0] * (drafted + 1), parent=0, ahead=1, wanted=8, chance=chance, reach=reach)


def at_speed(tokens_per_s, **options):
    """A policy that has seen long enough that the run makes so many tokens a second."""
    made = policy(costs=FREE, **options)
    for _ in range(400):
        made.observe_round(tokens_per_s, 1.0, batch_size=1)
    return made


ALL_ACCEPTED = Verdict(MISS, "neural", (0.95,) * 4, accepted=4, rank=1, missed=False)


# --- lookahead and budget ------------------------------------------------------------------------


def test_automatic_values_stand_in_until_passes_were_measured():
    assert (policy().lookahead, policy().budget) == (4, 8)
    timed = policy(costs=FREE)
    assert (timed.lookahead, timed.budget) == (MAX_AUTO_LOOKAHEAD, MAX_AUTO_BUDGET)


def test_what_was_given_is_kept():
    given = policy(costs=CONTENDED, lookahead=3, budget=5)
    assert (given.lookahead, given.budget) == (3, 5)
    assert given.worth_verifying(path(drafted=2, reach=1e-9), MISS)


def test_a_deterministic_run_does_not_follow_measured_times():
    steady = policy(costs=CONTENDED, deterministic=True)
    assert (steady.lookahead, steady.budget) == (4, 8)
    assert steady.worth_verifying(path(drafted=2, reach=1e-9), MISS)
    assert steady.worth_drafting([path(drafted=2, reach=1e-9)], [MISS])
    paths = [path(chance=1e-9), path(chance=0.5)]
    assert steady.likeliest(paths, given=0, remaining=0.0) == paths


def test_a_draft_ends_where_a_token_is_not_worth_its_verification():
    judging = at_speed(30)
    # a = .75, the prior: .75 reach / 30 per second against 5 ms: worth it from reach .2 on
    assert judging.worth_verifying(path(drafted=3, reach=0.21), MISS)
    assert not judging.worth_verifying(path(drafted=3, reach=0.19), MISS)


def test_nothing_is_built_ahead_where_the_target_loses_more_by_it():
    paths = [path(chance=0.5), path(chance=0.2)]
    assert policy(costs=FREE).likeliest(paths, given=0, remaining=math.inf) == paths
    assert policy(costs=CONTENDED).likeliest(paths, given=0, remaining=math.inf) == []
    told = policy(costs=CONTENDED, budget=2)  # whoever names a budget has it spent
    assert told.likeliest(paths, given=0, remaining=math.inf) == paths


def test_the_likeliest_branch_grows_first():
    paths = [path(chance=0.001), path(chance=0.8), path(chance=0.0001)]
    assert policy(costs=FREE).likeliest(paths, given=0, remaining=math.inf) == [paths[1]]
    assert policy(costs=FREE, build="all").likeliest(paths, 0, math.inf) == paths


def test_a_pass_that_would_outlast_the_verification_is_left_out():
    paths = [path(chance=0.5)]  # saves 5 ms of a pass just in time; its own takes 10
    assert policy(costs=FREE).likeliest(paths, given=0, remaining=0.006) == paths
    assert policy(costs=FREE).likeliest(paths, given=0, remaining=0.004) == []


def test_how_long_a_verification_takes_is_corrected_by_what_was_seen():
    judging = policy(costs=FREE)
    assert judging.expected_verification(11) == pytest.approx(0.150)
    for _ in range(400):
        judging.observe_verification(0.2, tokens=1, working=0.0)  # twice what was measured at first
    assert judging.expected_verification(11) == pytest.approx(0.300)
    assert policy().expected_verification(1) == math.inf


def test_contention_is_what_rounds_show():
    paths = [path(chance=0.5)]  # saves 5 ms of a pass of 10: half a second a second
    judging = policy(costs=FREE)
    assert judging.contention == 0.0
    for _ in range(400):
        judging.observe_verification(0.140, tokens=1, working=0.050)  # 40 ms lost in 50
    assert judging.contention == pytest.approx(0.8)
    assert judging.likeliest(paths, given=0, remaining=math.inf) == []
    for _ in range(400):
        judging.observe_verification(0.110, tokens=1, working=0.050)
    assert judging.contention == pytest.approx(0.2)
    assert judging.likeliest(paths, given=0, remaining=math.inf) == paths
    for _ in range(400):
        judging.observe_verification(0.090, tokens=1, working=0.050)  # quicker than alone
    assert judging.contention == 0.0


def test_a_few_rounds_outweigh_a_disturbed_timing():
    judging = policy(costs=CONTENDED)
    assert judging.contention == pytest.approx(0.75)
    # 5 rounds of .46 s, 3 drafted tokens verified, count as seen: 1.725 s lost in 2.3
    for _ in range(10):
        judging.observe_verification(0.110, tokens=3, working=0.100)  # none lost
    kept = 0.95**10
    decayed = 0.1 * (1 - kept) / 0.05
    assert judging.contention == pytest.approx(1.725 * kept / (2.3 * kept + decayed))


def test_passes_beside_the_target_are_priced_as_they_turn_out():
    paths = [path(chance=0.5)]
    judging = policy(costs=FREE)
    for _ in range(400):
        judging.observe_verification(0.130, tokens=1, working=0.100)  # .3 lost a second
        judging.observe_pass(0.010, rows=1)
    assert judging.likeliest(paths, given=0, remaining=math.inf) == paths  # saves .5 a second
    for _ in range(400):
        judging.observe_pass(0.020, rows=1)  # now .25
    assert judging.likeliest(paths, given=0, remaining=math.inf) == []


def test_a_paths_reach_is_the_chance_that_all_its_tokens_are_accepted():
    judging = policy()
    assert judging.reach(path(reach=0.5), confidence=0.35) == pytest.approx(0.5 * 0.35)
    judging.observe(ALL_ACCEPTED)  # the bin of .95 has (3.8 + 4) / 8
    assert judging.reach(path(), confidence=0.95) == pytest.approx(0.975)


def test_the_chance_of_a_guess_is_its_position_times_its_rank():
    # priors: accepted .95, .55; ranks (1/2, 1/6, 1/12, ...)
    guesses = [Outcome(0, 7), Outcome(1, 8), Outcome(1, 9), Outcome(2, 1), Outcome(2, 2)]
    expected = [0.05 / 2, 0.95 * 0.45 / 2, 0.95 * 0.45 / 6, 0.95 * 0.55 / 2, 0.95 * 0.55 / 6]
    assert policy().chances([0.95, 0.55], guesses) == pytest.approx(expected)


# --- fan-out -------------------------------------------------------------------------------------


def test_each_fan_out_has_its_own_rule():
    confidences = [0.95, 0.55]
    chosen = {
        name: policy(
            fan_out=name, budget=6, acceptance=0.5, exponent=1.0, least_chance=0.0
        ).fan_out(HIT, confidences)
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
    assert {policy(fallback=name).backup(n, found) for n in (1, 64) for found in (0, 1)} == {name}


def test_the_adaptive_fallback_follows_the_batch_size_but_never_in_a_deterministic_run():
    adaptive = policy(fallback="adaptive")
    assert 1 < adaptive.critical_batch_size < 2  # by the priors; see test_fallback
    assert (adaptive.backup(1, found=True), adaptive.backup(2, found=True)) == ("neural", "fast")
    assert policy(fallback="adaptive", deterministic=True).backup(64, found=True) == "neural"


def test_backup_times_are_told_in_verifications():
    slow = policy(fallback="adaptive")
    slow.observe_backup(9.0)  # before any verification there is no unit to tell it in
    assert slow.backup(1, found=True) == "neural"
    slow.observe_verification(0.1, tokens=5, working=0.0)
    for _ in range(60):
        slow.observe_backup(0.2)  # T_b 2: the model loses even alone
    assert slow.backup(1, found=True) == "fast"


def test_a_fast_draft_is_as_long_as_its_acceptance_makes_worth_it():
    judging = at_speed(30)
    # a = 1/2 at first: 1/2, 1/4, 1/8 of 33 ms against 5 ms a token
    assert judging.fast_length(8) == 2
    for _ in range(100):
        judging.observe_fast(accepted=8, drafted=8)
    assert judging.fast_length(8) == 8
    for _ in range(400):
        judging.observe_fast(accepted=0, drafted=8)
    assert judging.fast_length(8) == 1  # to go on learning
    assert judging.fast_length(0) == 0
    assert at_speed(30, lookahead=5).fast_length(5) == 5


# --- returning short -----------------------------------------------------------------------------


def test_a_token_is_worth_its_pass_while_it_brings_more_than_the_run_does():
    judging = at_speed(30)
    # .75 reach / 30 per second, less 5 ms, against a pass of 10 ms: worth it from reach .6 on
    assert judging.worth_drafting([path(drafted=1, reach=0.61)], [MISS])
    assert not judging.worth_drafting([path(drafted=1, reach=0.59)], [MISS])
    # two sequences share a pass of 11 ms
    assert judging.worth_drafting([path(drafted=1, reach=0.43)] * 2, [MISS, HIT])
    assert not judging.worth_drafting([path(drafted=1, reach=0.41)] * 2, [MISS, HIT])


def test_what_a_token_is_worth_is_learned():
    judging = at_speed(30)
    for _ in range(5):
        judging.observe(ALL_ACCEPTED)  # a = (10 * .75 + 20) / 30 = .9167
    assert judging.worth_drafting([path(drafted=1, reach=0.50)], [MISS])
    assert not judging.worth_drafting([path(drafted=1, reach=0.48)], [MISS])


def test_a_hit_is_handed_over_as_it_was_found():
    judging = at_speed(30)
    assert not judging.worth_drafting([path(drafted=1)], [HIT])
    assert judging.worth_drafting([path(drafted=1)] * 2, [HIT, MISS])  # shares a miss's pass
    assert at_speed(30, return_short=False).worth_drafting([path(drafted=1)], [HIT])


@pytest.mark.parametrize(
    "judging",
    [at_speed(30, return_short=False), policy(costs=FREE, deterministic=True), policy()],
    ids=["switched off", "deterministic", "nothing timed"],
)
def test_otherwise_a_speculation_is_always_completed(judging):
    assert judging.worth_drafting([path(drafted=1, reach=1e-9)], [MISS])
