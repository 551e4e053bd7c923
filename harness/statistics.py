"""Quantiles, bootstrap intervals and tests over plain arrays. Knows nothing of runs or cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_RESAMPLES = 5000
_SEED = 0  # the same run always shows the same interval
_ROUNDING = 1e-12  # relative spread of a statistic that only rounding moves


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


def geometric_mean(values: ArrayLike) -> float | None:
    """exp(mean(log values)) of positive values; None when there are none."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    return float(np.exp(np.log(array).mean())) if array.size else None


def speedup(
    baseline_time: ArrayLike,
    baseline_tokens: ArrayLike,
    method_time: ArrayLike,
    method_tokens: ArrayLike,
) -> Estimate:
    """How much less time per token a method takes than a baseline on the same prompts.

    (sum baseline_time / sum baseline_tokens) / (sum method_time / sum method_tokens), with a
    BCa bootstrap over prompts (Efron 1987): prompts are drawn with replacement, each with its four
    numbers together. Where both emit equally many tokens this is the ratio of total times. It is
    never a mean of ratios.

    Args:
        baseline_time: shape (prompts,), time of each prompt, positive, in any unit.
        baseline_tokens: shape (prompts,), tokens emitted, positive.
        method_time: likewise, the same prompt at the same index.
        method_tokens: likewise.
    """
    baseline = _TimePerToken.of(baseline_time, baseline_tokens)
    method = _TimePerToken.of(method_time, method_tokens)
    return _estimate([method.prompts], lambda drawn: baseline.over(drawn) / method.over(drawn))


def unpaired_speedup(
    baseline_time: ArrayLike,
    baseline_tokens: ArrayLike,
    method_time: ArrayLike,
    method_tokens: ArrayLike,
) -> Estimate:
    """As `speedup`, on prompts that are not the same: the two sides are resampled apart.

    `n` is the number of prompts on the smaller side.
    """
    baseline = _TimePerToken.of(baseline_time, baseline_tokens)
    method = _TimePerToken.of(method_time, method_tokens)
    return _estimate(
        [baseline.prompts, method.prompts],
        lambda ours, theirs: baseline.over(ours) / method.over(theirs),
    )


def rate(amounts: ArrayLike, times: ArrayLike) -> Estimate:
    """Total amount over total time, with the interval of `speedup`.

    Args:
        amounts: shape (prompts,), what each prompt yielded, positive.
        times: shape (prompts,), how long each took, positive.
    """
    inverse = _TimePerToken.of(times, amounts)
    return _estimate([inverse.prompts], lambda drawn: 1 / inverse.over(drawn))


@dataclass(frozen=True, slots=True)
class _TimePerToken:
    time: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @classmethod
    def of(cls, time: ArrayLike, tokens: ArrayLike) -> _TimePerToken:
        import numpy as np

        return cls(np.asarray(time, dtype=np.float64), np.asarray(tokens, dtype=np.float64))

    @property
    def prompts(self) -> int:
        return int(self.time.size)

    def over(self, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """Total time over total tokens of the prompts drawn; `drawn` is (..., prompts)."""
        rates: NDArray[np.float64] = self.time[drawn].sum(-1) / self.tokens[drawn].sum(-1)
        return rates


def _estimate(sizes: Sequence[int], statistic: Callable[..., Any]) -> Estimate:
    """The statistic of all observations and its interval; it takes the indices of each sample."""
    import numpy as np

    n = min(sizes)
    if n == 0:
        return Estimate(None, None, None, 0)
    samples = [np.arange(size) for size in sizes]
    value = float(statistic(*samples))
    if n == 1:
        return Estimate(value, None, None, 1)
    return Estimate(value, *_bootstrap(samples, statistic, value), n)


def _bootstrap(
    samples: Sequence[NDArray[np.int64]], statistic: Callable[..., Any], value: float
) -> tuple[float, float]:
    """The BCa interval; a point where nothing varies, percentiles where BCa is not defined."""
    import numpy as np
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's word for the degenerate cases handled below
        found = bootstrap(
            samples,
            lambda *drawn, axis: statistic(*drawn),  # noqa: ARG005 - scipy resamples the last axis
            vectorized=True,
            n_resamples=_RESAMPLES,
            batch=500,
            confidence_level=CONFIDENCE,
            method="BCa",
            random_state=np.random.default_rng(_SEED),
        )
    spread = found.bootstrap_distribution
    if np.ptp(spread) <= _ROUNDING * abs(value):
        return value, value
    low, high = found.confidence_interval
    if not np.isfinite([low, high]).all():
        low, high = np.quantile(spread, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_test(first: ArrayLike, second: ArrayLike) -> float:
    """p-value of Wilcoxon's signed-rank test on log(second / first); positive, same prompts."""
    import numpy as np
    from scipy.stats import wilcoxon

    logs = np.log(np.asarray(second, dtype=np.float64) / np.asarray(first, dtype=np.float64))
    if not np.any(np.abs(logs) > _ROUNDING):
        return 1.0
    return float(wilcoxon(logs).pvalue)


def unpaired_test(first: ArrayLike, second: ArrayLike) -> float:
    """p-value of the Mann-Whitney test; the two sides may differ in size."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(first, second, alternative="two-sided").pvalue)
