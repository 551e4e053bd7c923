"""Directed tests: z statistics of sums that have mean 0 whenever every token is drawn from p.

For a function f_t that is fixed before token t is drawn,

    z = sum(f_t(x_t) - E_p f_t) / sqrt(sum Var_p f_t)

is standard normal under exactness, by the martingale central limit theorem: each term has mean 0
given everything before it. f is the indicator of a set (the target's most likely token, the draft's
top F) or log p. A stratum may be any property known before token t is drawn, and an output may end
by any rule that looks at the tokens so far: neither changes the mean of a term.

A short or skewed sum is not quite normal. Its third moment is known as well, so tail
probabilities are taken from the Pearson III distribution with the same skewness, which is the
normal one for skewness 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from harness.equivalence.hypothesis import TestOutcome

Floats = NDArray[np.float64]

LEAST_VARIANCE = 10.0  # of a counted sum; with less it is too far from any continuous law


def membership_test(
    name: str, stratum: str, member: NDArray[np.bool_], mass: Floats
) -> TestOutcome | None:
    """Whether tokens fall into a set as often as the target says.

    Args:
        name: of the set.
        stratum: of the tokens.
        member: [n], whether the token was in its set A_t.
        mass: [n], p_t(A_t).

    Returns:
        None where the tokens say too little: their variance is below `LEAST_VARIANCE`.
    """
    mass = np.clip(mass, 0.0, 1.0)
    variance = mass * (1 - mass)
    found = _excess(name, stratum, member - mass, variance, variance * (1 - 2 * mass))
    return found and replace(found, variance=float(variance.mean()))


def log_probability_test(
    stratum: str, log_p: Floats, mean: Floats, variance: Floats, third: Floats
) -> TestOutcome | None:
    """Whether log p(x_t) is on average what it is under p; high when tokens are too likely.

    Args:
        stratum: of the tokens.
        log_p: [n], of the token.
        mean: [n], of log p_t under p_t.
        variance: [n], likewise.
        third: [n], third central moment, likewise.

    Returns:
        None where the tokens say too little.
    """
    return _excess("log p", stratum, log_p - mean, variance, third)


def _excess(
    name: str, stratum: str, difference: Floats, variance: Floats, third: Floats
) -> TestOutcome | None:
    total = float(variance.sum())
    if total < LEAST_VARIANCE:
        return None
    z = float(difference.sum()) / np.sqrt(total)
    skewness = float(third.sum()) / total**1.5
    return TestOutcome(name, stratum, len(difference), float(z), two_sided(z, skewness))


def two_sided(z: float, skewness: float) -> float:
    """Probability of a value at least as far out on its side, doubled; mean 0 and variance 1."""
    law = stats.pearson3(skewness)
    return float(min(1.0, 2 * min(law.sf(z), law.cdf(z))))
