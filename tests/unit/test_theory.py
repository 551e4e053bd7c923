"""The speed formulas: by hand, and against a simulation of the process that they describe."""

import math

import numpy as np
import pytest

from impl.ssd.fan_out import geometric
from impl.ssd.theory import (
    Backup,
    SpeedInputs,
    critical_batch_size,
    expected_tokens,
    hit_rate,
    predict,
)


def test_expected_tokens_by_hand():
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6


def test_hit_rate_by_hand():
    # P = (.5, .25, .25); hits 1 - 1/(1+F) at r = 1: F = 3, 1, 0 give 3/4, 1/2, 0.
    assert hit_rate(0.5, 1.0, (3, 1, 0)) == pytest.approx(0.5 * 0.75 + 0.25 * 0.5)
    assert hit_rate(1.0, 2.0, (0, 0, 1)) == pytest.approx(0.75)
    assert hit_rate(0.5, 1.0, (0, 0, 0)) == 0


def test_speed_by_hand():
    inputs = SpeedInputs(0.75, 4.0, 0.8, Backup(tokens=2.0, time=0.6))
    # (.75 * 4 + .25 * 2) / (.75 * 1 + .25 * 1.6) = 3.5 / 1.15
    prediction = predict(inputs)
    assert prediction.tokens == pytest.approx(3.5)
    assert prediction.time == pytest.approx(1.15)
    assert prediction.speed == pytest.approx(3.5 / 1.15)


def test_a_slow_build_and_a_batch_cost_time_by_hand():
    slow = SpeedInputs(0.75, 4.0, 1.2, Backup(2.0, 0.6))
    assert predict(slow).time == pytest.approx(0.75 * 1.2 + 0.25 * 1.6)
    batch = SpeedInputs(0.5, 4.0, 1.0, Backup(2.0, 0.6), batch_size=3)
    assert predict(batch).stall_rate == pytest.approx(7 / 8)
    assert predict(batch).time == pytest.approx(1 / 8 + 7 / 8 * 1.6)
    assert predict(batch).tokens == pytest.approx(3)


def test_no_hits_is_plain_speculative_decoding():
    inputs = SpeedInputs(0.0, 9.0, 1.0, Backup(expected_tokens(0.8, 4), 0.5))
    assert predict(inputs).speed == pytest.approx((1 - 0.8**5) / 0.2 / 1.5)


def critical(hit=0.5, neural=(3.0, 1.0), fast=(2.0, 0.0)):
    return critical_batch_size(SpeedInputs(hit, 4.0, 1.0, Backup(*neural)), Backup(*fast))


def test_critical_batch_size_by_hand():
    # Tokens 3.5 and 3; times 2 - x and 1, x = .5^b: 3.5 / (2 - x) = 3 at x = 5/6.
    # That is below b = 1; at h = .9: tokens 3.9, 3.8; 3.9 / (2 - x) = 3.8 at x = 2 - 3.9/3.8.
    assert critical(0.5) == 1
    assert critical(0.9) == pytest.approx(max(1, math.log(2 - 3.9 / 3.8) / math.log(0.9)))
    # A weak fast backup: tokens 3.9 and 3.65, neural time 1 + (1 - x) * .1:
    # 3.9 / (1.1 - .1 x) = 3.65 at x = (1.1 - 3.9 / 3.65) / .1.
    x = (1.1 - 3.9 / 3.65) / 0.1
    expected = math.log(x) / math.log(0.9)
    assert expected > 10
    assert critical(0.9, (3.0, 0.1), (0.5, 0.0)) == pytest.approx(expected)


def test_critical_batch_size_at_the_edges():
    assert critical(fast=(0.1, 0.0), neural=(3.0, 0.01)) == math.inf  # never worth it
    assert critical(fast=(3.0, 0.5)) == 1  # as many tokens, sooner
    assert critical(hit=1.0) == math.inf  # no miss
    assert critical(hit=0.0) == 1  # always a miss: 2 / 1 against 3 / 2


def test_speeds_cross_at_the_critical_batch_size():
    neural, fast = Backup(3.0, 0.1), Backup(0.5, 0.0)
    limit = critical(0.9, (3.0, 0.1), (0.5, 0.0))
    for batch, fast_wins in ((math.floor(limit), False), (math.ceil(limit), True)):
        speeds = [
            predict(SpeedInputs(0.9, 4.0, 1.0, backup, batch)).speed for backup in (neural, fast)
        ]
        assert (speeds[1] > speeds[0]) == fast_wins


def simulate(rng, batch, rounds, fan_out, exponent, acceptance, build_time, backup_time):
    """Tokens per sequence, time and hits of the process itself, drawn token by token."""
    lookahead = len(fan_out) - 1
    hit = np.zeros(batch, dtype=bool)
    tokens, time, hits = 0, 0.0, 0
    for _ in range(rounds):
        time += max(1.0, build_time) if hit.all() else 1 + backup_time
        rate = np.where(hit, acceptance[0], acceptance[1])
        draws = rng.random((batch, lookahead)) < rate[:, None]
        accepted = np.cumprod(draws, axis=1).sum(axis=1).astype(int)
        tokens += int((accepted + 1).sum())
        ranks = np.ceil(rng.random(batch) ** (-1 / exponent)) - 1
        hits += int(hit.sum())
        hit = ranks <= np.array(fan_out)[accepted]
    return tokens / batch, time, hits / (batch * rounds)


@pytest.mark.parametrize(
    ("batch", "acceptance", "build_time"),
    [(1, (0.8, 0.8), 0.9), (1, (0.85, 0.6), 1.3), (4, (0.8, 0.5), 0.9)],
)
def test_prediction_equals_the_simulated_process(batch, acceptance, build_time):
    fan_out, exponent, backup_time = geometric(12, 4, 0.8, 1.1), 1.1, 0.7
    rounds = 20_000
    tokens, time, hits = simulate(
        np.random.default_rng(1), batch, rounds, fan_out, exponent, acceptance, build_time, 0.7
    )

    after_hit, after_miss = (hit_rate(a, exponent, fan_out) for a in acceptance)
    h = after_miss / (1 - after_hit + after_miss)  # h = h after_hit + (1 - h) after_miss
    on_hit, on_miss = (expected_tokens(a, 4) for a in acceptance)
    prediction = predict(
        SpeedInputs(h, on_hit, build_time, Backup(on_miss, backup_time), batch_size=batch)
    )
    # Standard errors are below .4% at 20,000 rounds.
    assert hits == pytest.approx(h, rel=0.015)
    assert tokens / rounds == pytest.approx(prediction.tokens, rel=0.015)
    assert tokens / time == pytest.approx(prediction.speed, rel=0.015)
