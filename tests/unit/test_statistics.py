import numpy as np
import pytest

from harness.statistics import Estimate, quantiles, speedup


def test_quantiles_interpolate_linearly():
    assert quantiles([4.0, 1.0, 3.0, 2.0], (0.0, 0.5, 0.95)) == pytest.approx((1.0, 2.5, 3.85))
    assert quantiles([7.0], (0.5, 0.95)) == (7.0, 7.0)


def test_quantiles_of_nothing_are_none():
    assert quantiles([], (0.5, 0.95)) == (None, None)


def test_speedup_is_the_ratio_of_total_times_never_the_mean_of_ratios():
    #  10 / 5 = 2 and 90 / 90 = 1: the mean of ratios is 1.5, the ratio of totals 100 / 95
    assert speedup([10, 90], [8, 8], [5, 90], [8, 8]).value == pytest.approx(100 / 95)


def test_speedup_is_per_token_where_outputs_differ_in_length():
    #  baseline (30 + 30) / (10 + 20) = 2 per token, method (10 + 10) / (5 + 15) = 1
    assert speedup([30, 30], [10, 20], [10, 10], [5, 15]).value == pytest.approx(2.0)


def test_interval_over_two_prompts_is_known_by_enumeration():
    # resamples: (a, a) and (b, b) with probability 1/4 each, (a, b) with 1/2; the 2.5% and 97.5%
    # quantiles are the two prompts' own ratios, 2 and 4
    estimate = speedup([20, 40], [1, 1], [10, 10], [1, 1])
    assert estimate == Estimate(value=3.0, low=2.0, high=4.0, n=2)


def test_prompts_are_resampled_in_pairs():
    baseline = np.array([1.0, 10.0, 100.0, 1000.0])  # far apart, yet each exactly twice as slow
    estimate = speedup(2 * baseline, np.ones(4), baseline, np.ones(4))
    assert (estimate.low, estimate.high) == pytest.approx((2.0, 2.0))


def test_interval_covers_the_truth_as_often_as_it_says():
    # 300 samples of 40 prompts, true ratio 1.5; a 95% percentile interval covers slightly less.
    # Chance of fewer than 265 hits at 93%: below 0.2%.
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        difficulty = rng.gamma(4.0, size=40)
        baseline = 1.5 * difficulty * rng.lognormal(-0.02, 0.2, 40)
        method = difficulty * rng.lognormal(-0.02, 0.2, 40)
        estimate = speedup(baseline, np.ones(40), method, np.ones(40))
        hits += estimate.low <= 1.5 <= estimate.high
    assert 265 <= hits <= 298


def test_one_prompt_has_no_interval_and_none_has_no_value():
    assert speedup([4], [1], [2], [1]) == Estimate(2.0, None, None, 1)
    assert speedup([], [], [], []) == Estimate(None, None, None, 0)


def test_the_same_data_give_the_same_interval():
    times = np.random.default_rng(0).random(20)
    ones = np.ones(20)
    assert speedup(times, ones, ones, ones) == speedup(times, ones, ones, ones)
