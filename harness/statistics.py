"""Quantiles and bootstrap intervals over plain arrays. Knows nothing of runs, cells or prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_RESAMPLES = 5000
_SEED = 0  # the same run always shows the same interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% confidence interval.

    Attributes:
        value: the estimate; None when there is nothing to estimate it from.
        low, high: the interval; None with fewer than two observations.
        n: independent observations (prompts) behind it.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int


def quantiles(values: ArrayLike, at: Sequence[float]) -> tuple[float | None, ...]:
    """Quantiles by linear interpolation; None for each when there are no values."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return (None,) * len(at)
    return tuple(float(quantile) for quantile in np.quantile(array, at))


def speedup(
    baseline_time: ArrayLike,
    baseline_tokens: ArrayLike,
    method_time: ArrayLike,
    method_tokens: ArrayLike,
) -> Estimate:
    """How much less time per token a method takes than a baseline on the same prompts.

    (sum baseline_time / sum baseline_tokens) / (sum method_time / sum method_tokens), with a
    percentile bootstrap over prompts (Efron and Tibshirani 1993, section 13.3): prompts are drawn
    with replacement, each with its four numbers together. Where both emit equally many tokens this
    is the ratio of total times. It is never a mean of ratios.

    Args:
        baseline_time: shape (prompts,), time of each prompt, positive, in any unit.
        baseline_tokens: shape (prompts,), tokens emitted, positive.
        method_time: likewise, the same prompt at the same index.
        method_tokens: likewise.
    """
    import numpy as np

    sample = tuple(
        np.asarray(values, dtype=np.float64)
        for values in (baseline_time, baseline_tokens, method_time, method_tokens)
    )
    n = sample[0].size
    if n == 0:
        return Estimate(None, None, None, 0)
    value = float(_ratio_of_sums(*sample))
    if n == 1:
        return Estimate(value, None, None, 1)
    low, high = _bootstrap(sample)
    return Estimate(value, low, high, n)


def _ratio_of_sums(
    baseline_time: NDArray[np.float64],
    baseline_tokens: NDArray[np.float64],
    method_time: NDArray[np.float64],
    method_tokens: NDArray[np.float64],
    *,
    axis: int = -1,
) -> Any:
    baseline = baseline_time.sum(axis) / baseline_tokens.sum(axis)
    return baseline / (method_time.sum(axis) / method_tokens.sum(axis))


def _bootstrap(sample: tuple[NDArray[np.float64], ...]) -> tuple[float, float]:
    import numpy as np
    from scipy.stats import bootstrap

    interval = bootstrap(
        sample,
        _ratio_of_sums,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=500,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)
