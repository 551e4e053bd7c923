"""What bias a test of given size sees: normal approximation of the directed tests.

A method that moves a share d of the probability mass into a set A at each token is d away from the
target in total variation, and shifts the sum of the test on A by n d. With v the mean of
p(A)(1 - p(A)) the test at level alpha sees it with probability `power` when

    n d >= (z_{1 - alpha/2} + z_power) sqrt(n v).

The variance under the bias is taken to be v as well, which errs by O(d).
"""

from __future__ import annotations

import math

from scipy import stats

POWER = 0.95


def smallest_bias(n: int, variance: float, alpha: float, power: float = POWER) -> float:
    """The smallest mean total variation toward a set that would be seen.

    Args:
        n: tokens.
        variance: mean of p(A)(1 - p(A)) over them.
        alpha: level of this one test, two-sided.
        power: chance to see it.
    """
    return min(1.0, _reach(alpha, power) * math.sqrt(variance / n))


def tokens_needed(bias: float, variance: float, alpha: float, power: float = POWER) -> int:
    """The number of tokens at which a bias (total variation toward a set) would be seen."""
    return math.ceil(variance * (_reach(alpha, power) / bias) ** 2)


def _reach(alpha: float, power: float) -> float:
    return float(stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power))
