from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from harness.statistics import (
    Estimate,
    PairedCosts,
    geometric_mean,
    paired_test,
    quantiles,
    rate,
    speedup,
    speedup_over_runs,
    unpaired_speedup,
    unpaired_test,
)


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


def bca_by_enumeration(baseline, method):
    """The BCa interval of sum(baseline) / sum(method), every resample once (Efron 1987)."""
    normal, n = NormalDist(), len(baseline)
    pairs = list(zip(baseline, method, strict=True))

    def ratio(rows):
        return sum(b for b, _ in rows) / sum(m for _, m in rows)

    value = ratio(pairs)
    ratios = sorted(ratio(rows) for rows in product(pairs, repeat=n))
    below = sum(r < value for r in ratios) + sum(r == value for r in ratios) / 2
    bias = normal.inv_cdf(below / len(ratios))
    left_out = [ratio(pairs[:i] + pairs[i + 1 :]) for i in range(n)]
    apart = [sum(left_out) / n - each for each in left_out]
    skew = sum(d**3 for d in apart) / (6 * sum(d**2 for d in apart) ** 1.5)
    ends = []
    for z in (normal.inv_cdf(0.025), normal.inv_cdf(0.975)):
        share = normal.cdf(bias + (bias + z) / (1 - skew * (bias + z)))
        ends.append(ratios[round(share * (len(ratios) - 1))])
    return ends, ratios


def test_interval_is_bca_as_enumerated():
    # 5 skewed prompts, 3125 resamples; 5000 random ones put an end within a few ranks of its place
    baseline, method = [10.0, 12.0, 9.0, 30.0, 11.0], [5.0, 7.0, 6.0, 6.0, 5.0]
    (low, high), ratios = bca_by_enumeration(baseline, method)
    estimate = speedup(baseline, np.ones(5), method, np.ones(5))
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=0.02)
    plain = np.quantile(ratios, [0.025, 0.975])  # the percentile interval is another one
    assert abs(plain[1] - high) / high > 0.02


def test_unpaired_sides_are_resampled_apart():
    # each side alone: (20 + 40) / 2 against (10 + 10) / 2; and paired, twins would be a point
    estimate = unpaired_speedup([20, 40], [1, 1], [10, 10], [1, 1])
    assert estimate == Estimate(value=3.0, low=2.0, high=4.0, n=2)
    times = np.array([1.0, 10.0, 100.0, 1000.0])
    twins = unpaired_speedup(times, np.ones(4), times, np.ones(4))
    assert twins.value == 1.0
    assert twins.low < 0.5
    assert twins.high > 2.0


def test_unpaired_sides_may_differ_in_size():
    assert unpaired_speedup([4, 4, 4], [1, 1, 1], [2, 2], [1, 1]) == Estimate(2.0, 2.0, 2.0, 2)
    assert unpaired_speedup([4, 4], [1, 1], [2], [1]) == Estimate(2.0, None, None, 1)


def test_a_rate_is_the_total_over_the_total_with_the_interval_of_a_speedup():
    found = rate([10, 30, 20], [1, 2, 2])
    assert found.value == pytest.approx(60 / 5)
    # over a baseline that takes as long as it emits tokens, a speedup is the rate itself
    same = speedup([1, 1, 1], [1, 1, 1], [1, 2, 2], [10, 30, 20])
    assert (found.low, found.high, found.n) == (
        pytest.approx(same.low), pytest.approx(same.high), 3
    )  # fmt: skip
    assert rate([], []).value is None


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


def test_the_paired_test_by_enumeration():
    # three prompts, all slower: of the 8 sign patterns 2 are as extreme
    assert paired_test([1.0, 2.0, 4.0], [1.1, 2.4, 6.0]) == pytest.approx(2 / 8)
    assert paired_test([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert paired_test([3.0] * 6, [3.0, 3.0, 3.1, 2.9, 3.2, 2.8]) > 0.5  # ties and no change at all


def test_the_unpaired_test_by_enumeration():
    # of the 20 ways to pick three of six, 2 are as extreme
    assert unpaired_test([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)


def made_up_runs(rng, runs, *, prompts=12, between=0.05, datasets=1):
    """Runs of a method that is 1.1 times as fast: prompts differ by 10%, runs by `between`."""
    drawn = []
    for run_effects in [rng.normal(0, between, (runs, 1))] * datasets:
        shape = runs, prompts
        tokens = np.tile(rng.integers(20, 60, prompts).astype(float), (runs, 1))
        method_time = tokens * rng.lognormal(0, 0.02, shape)
        own = rng.lognormal(-0.005, 0.1, prompts)  # mean 1, so that 1.1 is the ratio of all prompts
        baseline_time = 1.1 * method_time * own * np.exp(run_effects)
        baseline_time = baseline_time * rng.lognormal(-0.0002, 0.02, shape)
        drawn.append(PairedCosts(baseline_time, tokens, method_time, tokens))
    return drawn


@pytest.mark.parametrize("datasets", [1, 3])
@pytest.mark.parametrize("runs", [3, 4, 5])
def test_the_interval_over_runs_covers_the_truth_as_often_as_it_says(runs, datasets):
    # 300 experiments at nominally 95%, truly 96 to 98% where runs and prompts both matter.
    # Chance of fewer than 276 hits at 95%: 1%; of more than 297 at 97%: 0.6%.
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(300):
        estimate = speedup_over_runs(made_up_runs(rng, runs, datasets=datasets))
        hits += estimate.low <= 1.1 <= estimate.high
    assert 276 <= hits <= 297


def test_that_test_sees_an_interval_over_the_prompts_of_one_run_fail():
    # a run is off by 5% and its prompts' mean by 3%: within 1.96 * 3% in about 7 of 10
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(100):
        (costs,) = made_up_runs(rng, 1)
        estimate = speedup(*(values[0] for values in costs))
        hits += estimate.low <= 1.1 <= estimate.high
    assert hits < 85


def paired(baseline, method):
    """Costs of runs whose prompts are all one token long; lists of runs of prompts."""
    times = np.array(baseline, float), np.array(method, float)
    return PairedCosts(times[0], np.ones_like(times[0]), times[1], np.ones_like(times[1]))


T2, T1 = 4.302653, 12.706205  # Student's 97.5% quantiles of 2 degrees of freedom and of 1


def test_the_interval_over_runs_is_that_worked_out_by_hand():
    # 400 / 100, 400 / 200, 400 / 50: ln 4 and ln 2 to both sides of it. Of two prompts with times a
    # and b the standard error is (a - b) / (a + b): 0.2, -0.25, 0.2, in the mean 0.05.
    estimate = speedup_over_runs([paired([[200, 200]] * 3, [[60, 40], [75, 125], [30, 20]])])
    reach = np.sqrt((T2 * np.log(2)) ** 2 / 3 + (T1 * 0.05) ** 2)
    assert estimate.runs == pytest.approx((4, 2, 8))
    assert estimate.between_runs == pytest.approx(np.log(2))
    assert (estimate.value, estimate.n) == (pytest.approx(4), 2)
    assert np.log([estimate.low, estimate.high]) == pytest.approx(
        [np.log(4) - reach, np.log(4) + reach]
    )


def test_datasets_count_alike_and_their_runs_are_paired():
    # as above, beside a dataset that is 1 / 4, 1 / 2, 1 / 8: every run is 1 in the mean of both,
    # so that only the prompts are left: half of 0.05, and half of (30 - 10) / (30 + 10)
    first = paired([[200, 200]] * 3, [[60, 40], [75, 125], [30, 20]])
    other = paired([[3, 1], [6, 2], [1.5, 0.5]], [[8, 8]] * 3)
    estimate = speedup_over_runs([first, other])
    reach = T1 * np.hypot(0.05, 0.5) / 2
    assert estimate.runs == pytest.approx((1, 1, 1))
    assert estimate.between_runs == pytest.approx(0, abs=1e-12)
    assert (estimate.value, estimate.n) == (pytest.approx(1), 4)
    assert np.log([estimate.low, estimate.high]) == pytest.approx([-reach, reach])


def test_two_runs_and_one_prompt_have_no_interval_over_runs():
    two = speedup_over_runs([paired([[200, 200]] * 2, [[60, 40], [75, 125]])])
    assert (two.value, two.low, two.high) == (pytest.approx(np.sqrt(8)), None, None)
    assert two.between_runs == pytest.approx(np.log(2) / np.sqrt(2))
    lone = speedup_over_runs([paired([[200]] * 3, [[50], [100], [25]])])
    assert (lone.value, lone.low, lone.high) == (pytest.approx(4), None, None)
    once = speedup_over_runs([paired([[200, 200]], [[60, 40]])])
    assert (once.value, once.low, once.between_runs) == (pytest.approx(4), None, None)
