"""Intervals in closed form, cheap enough for every point of every series of a thousand runs.

The speeds in a report of one run have bootstrap intervals (`harness.statistics`); these agree with
them for more than a few prompts and cost microseconds instead of milliseconds.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from harness.statistics import CONFIDENCE, Estimate, log_influence, student

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


def product_of_ratios(above: Sequence[ArrayLike], below: Sequence[ArrayLike]) -> Estimate:
    """The product of the totals of `above` over that of the totals of `below`.

    The interval is the delta method's on the logarithm, Student's t with n - 1 degrees of freedom:
    over the prompts' influences (`harness.statistics.log_influence`). A throughput is tokens over
    time; a speedup is baseline time and method tokens over baseline tokens and method time.

    Args:
        above: arrays of shape (prompts,), none negative.
        below: likewise, the same prompt at the same index.
    """
    numerators, denominators = [_array(x) for x in above], [_array(x) for x in below]
    n = len(numerators[0])
    totals = [float(x.sum()) for x in (*numerators, *denominators)]
    if n == 0 or min(totals) <= 0:
        return Estimate(None, None, None, n)
    value = float(np.prod(totals[: len(above)]) / np.prod(totals[len(above) :]))
    if n == 1:
        return Estimate(value, None, None, 1)
    influences = log_influence(numerators, denominators)
    reach = student(n - 1) * float(influences.std(ddof=1)) / n**0.5
    return Estimate(value, value * float(np.exp(-reach)), value * float(np.exp(reach)), n)


def share(parts: ArrayLike, wholes: ArrayLike) -> Estimate:
    """The total of `parts` over that of `wholes`, at least 0 and at most 1; see above.

    Args:
        parts: shape (prompts,), each at most its whole.
        wholes: shape (prompts,).
    """
    counted, of = _array(parts), _array(wholes)
    if of.sum() > 0 and counted.sum() == 0:
        return Estimate(0.0, None, None, len(of))
    found = product_of_ratios([counted], [of])
    high = None if found.high is None else min(found.high, 1.0)
    return Estimate(found.value, found.low, high, found.n)


def median(values: ArrayLike) -> Estimate:
    """The median with the interval of two order statistics, exact for any distribution.

    The interval is the narrowest symmetric one that covers the median with at least 95%; none
    where the extremes do not (fewer than six values).
    """
    ordered = np.sort(_array(values))
    n = len(ordered)
    if n == 0:
        return Estimate(None, None, None, 0)
    value, rank = float(np.median(ordered)), _lower_rank(n)
    if rank == 0:
        return Estimate(value, None, None, n)
    return Estimate(value, float(ordered[rank - 1]), float(ordered[n - rank]), n)


@cache
def _lower_rank(n: int) -> int:
    """The largest r with P(Binomial(n, 1/2) < r) <= 2.5%; 0 where there is none."""
    from scipy.stats import binom

    rank = int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    return rank if binom.cdf(rank - 1, n, 0.5) <= (1 - CONFIDENCE) / 2 else rank - 1


def _array(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
