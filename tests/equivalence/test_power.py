import numpy as np
import pytest
from known_process import ARGMAX, TARGET, decode, toward
from scipy import stats

from harness.equivalence.martingale import membership_test
from harness.equivalence.power import smallest_bias, tokens_needed


def test_by_hand():
    # 1.9600 + 1.6449 standard errors of 0.5 / 100 each
    assert smallest_bias(10_000, 0.25, alpha=0.05) == pytest.approx(0.018024, abs=1e-6)
    assert tokens_needed(0.018024, 0.25, alpha=0.05) == pytest.approx(10_000, rel=1e-3)
    assert smallest_bias(10, 0.25, alpha=1e-4) <= 1


def test_the_promised_bias_is_seen_as_often_as_promised():
    """Moves the promised share of the mass to the argmax and counts how often the test sees it."""
    alpha, seen, runs = 0.001, 0, 400
    sample = decode(TARGET, 300, 60, 0).scored()
    variance = float((sample["argmax_p"] * (1 - sample["argmax_p"])).mean())
    free = float((1 - sample["argmax_p"]).mean())  # a share s moves s * free on average
    for seed in range(1, runs + 1):
        n = len(sample["argmax_p"])
        share = smallest_bias(n, variance, alpha) / free
        columns = decode(toward(TARGET, ARGMAX, share), 300, 60, seed).scored()
        found = membership_test("argmax", "all", columns["is_argmax"][:n], columns["argmax_p"][:n])
        seen += found.p_value <= alpha
    # outputs end a little earlier or later under the bias, and its variance is a little smaller
    assert 0.90 <= seen / runs <= 0.99
    assert stats.binom.cdf(0.9 * runs, runs, 0.95) < 1e-4  # so 0.90 is no loose bound
    assert np.isfinite(share)
