"""Closed-form intervals and step detection of the dashboard."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from harness import statistics
from reports import intervals
from reports.dashboard.steps import find_steps


def test_equal_prompts_give_a_point() -> None:
    found = intervals.product_of_ratios([[10, 20, 30]], [[2, 4, 6]])
    assert (found.value, found.low, found.high, found.n) == pytest.approx((5, 5, 5, 3))


def test_two_prompts_by_hand() -> None:
    # Rates 4/1 and 2/1: influence x/3 - 1 = +1/3, -1/3; deviation sqrt(2)/3; over sqrt(2): 1/3.
    found = intervals.product_of_ratios([[4, 2]], [[1, 1]])
    reach = stats.t.ppf(0.975, 1) / 3
    assert found.value == 3
    assert found.low == pytest.approx(3 * np.exp(-reach))
    assert found.high == pytest.approx(3 * np.exp(reach))


def test_one_or_no_prompt_has_no_interval() -> None:
    one = intervals.product_of_ratios([[6]], [[3]])
    assert (one.value, one.low, one.high) == (2, None, None)
    assert intervals.product_of_ratios([[]], [[]]).value is None
    assert intervals.product_of_ratios([[0, 0]], [[1, 1]]).value is None


def test_agrees_with_the_bootstrap() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(30, 60, 60).astype(float)
    slow = tokens * rng.normal(1.0, 0.05, 60)
    fast = slow / 1.5 * rng.normal(1.0, 0.1, 60)
    ours = intervals.product_of_ratios([slow, tokens], [tokens, fast])
    theirs = statistics.speedup(slow, tokens, fast, tokens)
    assert ours.value == pytest.approx(theirs.value)
    assert theirs.value is not None
    assert ours.low == pytest.approx(theirs.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.high, abs=0.01)


@pytest.mark.parametrize(
    ("n", "ends"),
    [(5, None), (6, (1, 6)), (9, (2, 8)), (20, (6, 15))],  # tables of the sign test
)
def test_median_interval_is_the_sign_tests(n: int, ends: tuple[int, int] | None) -> None:
    found = intervals.median(list(range(n, 0, -1)))
    assert found.value == (n + 1) / 2
    assert (found.low, found.high) == (ends or (None, None))


def noisy(levels: list[tuple[int, float]], deviation: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    clean = np.concatenate([np.full(n, level) for n, level in levels])
    return list(clean * np.exp(rng.normal(0, deviation, len(clean))))


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_found_where_they_were_planted(seed: int) -> None:
    series = noisy([(30, 100.0), (20, 88.0), (25, 100.0)], 0.01, seed)
    found = find_steps(series)
    assert [step.index for step in found] == [30, 50]
    assert found[0].change == pytest.approx(-0.12, abs=0.01)
    assert found[1].change == pytest.approx(1 / 0.88 - 1, abs=0.012)
    assert found[0].last == pytest.approx(100, rel=0.01)


def test_two_runs_at_a_new_level_are_a_step_and_one_is_not() -> None:
    steady = noisy([(20, 50.0)], 0.01, 0)
    assert find_steps([*steady, 40.0]) == ()
    assert [step.index for step in find_steps([*steady, 40.0, 40.3])] == [20]


def test_an_outlier_in_the_middle_is_no_step() -> None:
    series = noisy([(40, 50.0)], 0.01, 1)
    series[17] = 20.0
    assert find_steps(series) == ()


def test_white_noise_has_hardly_ever_a_step() -> None:
    lengths = (4, 6, 12, 50)
    alarms = [
        bool(find_steps(noisy([(length, 1.0)], 0.02, seed)))
        for length in lengths
        for seed in range(250)
    ]
    assert sum(alarms) <= 10  # 1 in 100 allowed


def test_changes_within_the_tolerance_are_not_told() -> None:
    series = noisy([(30, 100.0), (30, 96.0)], 0.002, 2)
    assert find_steps(series) == ()
    assert len(find_steps(series, tolerance=0.03)) == 1


@pytest.mark.parametrize("series", [[], [1.0], [1.0, 2.0, 3.0], [0.0] * 8, [5.0] * 8])
def test_nothing_to_find(series: list[float]) -> None:
    assert find_steps(series) == ()
