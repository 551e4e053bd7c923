"""How long rounds take where a pass costs more the more tokens it has; worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from harness.simulation.acceptance import Acceptance
from harness.simulation.profile import MeasuredPasses, Profile, load_profile
from harness.simulation.scenario import Scenario
from harness.simulation.simulate import simulate
from harness.simulation.traces import Trace
from impl.ssd.budgeting import PassTimes

MISS = np.inf


def passes(fixed, each):
    """A pass over n tokens takes fixed + n * each seconds."""
    return MeasuredPasses(PassTimes((1, 2), (fixed + each, fixed + 2 * each)))


def trace(rounds):
    """Of (request, drafted, accepted, rank); each emits one token more than were accepted."""
    request, drafted, accepted, ranks = map(np.array, zip(*rounds, strict=True))
    return Trace(request, accepted + 1, drafted, accepted, ranks, awaited=request >= 0)


def profile(verify=(1.0, 0.01), draft=(0.1, 0.01), transfer=0.0):
    target, drafter = passes(*verify), passes(*draft)
    return Profile("linear", "measured", 4, 1, target, target, drafter, drafter, transfer)


def run(method, lookahead, acceptance, rounds=1, **changes):
    if isinstance(acceptance, float):
        acceptance = Acceptance((acceptance,))
    given = {"profile": profile(), "output_tokens": 10**9} | changes
    scenario = Scenario(method, lookahead=lookahead, acceptance=acceptance, **given)
    found = simulate([scenario], rounds)[0]
    return found, found.round_ms * rounds / 1e3


@pytest.mark.parametrize(
    ("method", "changes", "seconds"),
    [
        ("ar", {}, 1.02),
        ("sd", {}, 3 * 0.12 + 1.08),  # 2 (3 + 1) tokens
        ("tree", {"width": 2}, 3 * 0.12 + 1.14),  # 2 (3 * 2 + 1)
        ("ssd", {"budget": 0}, 1.08 + 3 * 0.12),
        ("ssd", {"budget": 0, "profile": profile(transfer=0.05)}, 1.13 + 3 * 0.12),
        ("amusd", {"profile": profile(transfer=0.05)}, 0.12 + 0.05 + 1.04),  # 2 (1 + 1)
        ("pearl", {"profile": profile(transfer=0.05)}, 1.02 + 0.05),  # one token each
        ("pearl", {"profile": profile(draft=(0.8, 0.2))}, 1.2),  # for the first token of each
    ],
)
def test_a_first_round_of_two_sequences(method, changes, seconds):
    _, taken = run(method, 3, 0.0, batch_size=2, **changes)
    assert taken == pytest.approx(seconds)


def test_speed_is_for_a_user_and_a_device_too():
    found, _ = run("amusd", 3, 0.0, batch_size=2)
    assert found.tokens_per_s == pytest.approx(2 / 1.16)
    assert found.tokens_per_s_per_user == pytest.approx(1 / 1.16)
    assert found.tokens_per_s_per_device == pytest.approx(2 / 1.16 / 5)


def test_keys_and_values_of_the_whole_batch_are_read():
    machine = load_profile("h100x4+1-llama-3.1-70b")
    _, taken = run("ar", 1, 0.0, batch_size=64, context=4000, profile=machine)
    expected = machine.verify_idle.seconds(np.array([64]), 64, 4000)[0]
    assert taken == pytest.approx(expected)
    assert expected > 1.2 * machine.verify_idle.seconds(np.array([64]), 1, 4000)[0]


def test_amusd_verifies_what_has_been_drafted_since():
    # A verification lasts 2.5 draft passes. Waiting 0.4: 1 token, 3.5 drafted after it, 2 judged,
    # 1.5 left; then 1 fed, 4 - 2 left; then 2 fed, 4.5 - 3 left; and over again.
    machine = profile(verify=(1.0, 0.0), draft=(0.4, 0.0))
    found, taken = run("amusd", 2, 1.0, rounds=5, profile=machine)
    assert taken == pytest.approx(5.4)
    assert found.acceptance_length * 5 == pytest.approx(2 + 2 + 3 + 2 + 3)
    assert found.stall_rate == pytest.approx(1 / 5)


def test_a_new_sequence_has_nothing_drafted():
    machine = profile(verify=(1.0, 0.0), draft=(0.4, 0.0))
    _, taken = run("amusd", 2, 1.0, rounds=5, profile=machine, output_tokens=2)
    assert taken == pytest.approx(5 * 1.4)
    _, taken = run("pearl", 4, 1.0, rounds=5, output_tokens=1)
    assert taken == pytest.approx(5 * 1.01)


def test_pearl_feeds_one_token_then_blocks():
    found, taken = run("pearl", 4, 1.0, rounds=3)
    assert taken == pytest.approx(1.01 + 1.04 + 1.04)
    assert found.acceptance_length * 3 == pytest.approx(1 + 4 + 4)


def test_only_the_missing_sequences_are_drafted_for():
    # Two requests: after the first round one hits and the other misses, in turns.
    recorded = trace([(0, 2, 2, 1), (0, 2, 0, MISS), (0, 2, 0, 1),
                      (1, 2, 0, MISS), (1, 2, 2, 1), (1, 2, 0, 1)])  # fmt: skip
    found, taken = run("ssd", 2, recorded, rounds=3, batch_size=2, budget=3, fan_out="uniform")
    verify = 1 + 0.01 * 6
    assert taken == pytest.approx((verify + 2 * 0.12) + 2 * (verify + 2 * 0.11))
    assert found.hit_rate == pytest.approx(0.5)
    assert found.stall_rate == 1


def test_a_recorded_draft_costs_its_own_passes():
    recorded = replace(trace([(0, 1, 1, MISS)]), as_recorded=True)
    for method in ("sd", "ssd"):
        found, taken = run(method, 3, recorded)
        assert taken == pytest.approx(1.02 + 0.11)
        assert found.acceptance_length == 2


def test_the_fast_fallback_feeds_its_own_tokens_and_drafts_none():
    changes = {"fallback": "fast", "fast_acceptance": 0.0, "fast_lookahead": 1, "budget": 0}
    _, taken = run("ssd", 3, 0.0, rounds=2, **changes)
    assert taken == pytest.approx((1.04 + 3 * 0.11) + 1.02)  # the first is drafted by the model
