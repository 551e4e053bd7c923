"""Quantiles, bootstrap intervals and tests over plain arrays. Knows nothing of runs or cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
FEWEST_RUNS = 3  # two tell next to nothing of how much runs differ: t(1) is 12.7
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


@dataclass(frozen=True, slots=True)
class RunsEstimate(Estimate):
    """A speedup over several runs of the same prompts; `n` counts the prompts, not the runs.

    Attributes:
        runs: the speedup of each run; `value` is their geometric mean.
        between_runs: standard deviation of their logarithms, so 0.05 is about 5%; None for one.
    """

    runs: tuple[float, ...]
    between_runs: float | None


class PairedCosts(NamedTuple):
    """Time, in any unit, and tokens of a baseline and of a method on the same prompts.

    Each of shape (runs, prompts) and positive; a prompt has the same index in all.
    """

    baseline_time: NDArray[np.float64]
    baseline_tokens: NDArray[np.float64]
    method_time: NDArray[np.float64]
    method_tokens: NDArray[np.float64]


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


def speedup_over_runs(datasets: Sequence[PairedCosts]) -> RunsEstimate:
    """The geometric mean of several runs' speedups, with an interval for other runs and prompts.

    A run's speedup is that of `speedup`, over several datasets the geometric mean of theirs. On the
    logarithm, with k runs and n_d prompts of each of D datasets, the interval reaches to both sides

        sqrt((t(k - 1) s / sqrt(k))**2 + sum_d (t(n_d - 1) s_d / (D sqrt(n_d)))**2)

    where s is the standard deviation of the runs' log speedups, s_d that of the prompts' influences
    on them (`log_influence`, averaged over the runs), t(f) Student's 97.5% quantile. The first term
    is what changes from run to run, the second the choice of prompts, which all runs share; such
    half-widths of independent parts add in squares (Howe 1974; Zou and Donner 2008).

    Args:
        datasets: one or more, all of the same runs. With fewer than `FEWEST_RUNS` or a dataset of
            fewer than two prompts there is no interval.
    """
    import numpy as np

    logs = np.array([_log_speedups(costs) for costs in datasets]).mean(0)
    k, sizes = len(logs), [costs.method_time.shape[1] for costs in datasets]
    value, runs = float(np.exp(logs.mean())), tuple(np.exp(logs).tolist())
    spread = float(logs.std(ddof=1)) if k > 1 else None
    if spread is None or k < FEWEST_RUNS or min(sizes) < 2:
        return RunsEstimate(value, None, None, sum(sizes), runs, spread)
    reaches = [student(k - 1) * spread / k**0.5]
    for n, costs in zip(sizes, datasets, strict=True):
        influences = log_influence(
            [costs.baseline_time, costs.method_tokens], [costs.baseline_tokens, costs.method_time]
        )
        among_prompts = float(influences.mean(0).std(ddof=1))
        reaches.append(student(n - 1) * among_prompts / n**0.5 / len(datasets))
    low, high = value * np.exp(np.array([-1, 1]) * np.hypot.reduce(reaches))
    return RunsEstimate(value, float(low), float(high), sum(sizes), runs, spread)


def _log_speedups(costs: PairedCosts) -> NDArray[np.float64]:
    """The log speedup of each run; shape (runs,)."""
    import numpy as np

    baseline = costs.baseline_time.sum(1) / costs.baseline_tokens.sum(1)
    logs: NDArray[np.float64] = np.log(
        baseline / (costs.method_time.sum(1) / costs.method_tokens.sum(1))
    )
    return logs


def log_influence(
    above: Sequence[NDArray[np.float64]], below: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Each prompt's influence on the log of the totals of `above` over the totals of `below`.

    It is the sum of x_i / mean(x) over `above` less that over `below` (Cochran, Sampling
    Techniques, 6.3); its standard error over prompts is that of the logarithm.

    Args:
        above: arrays of shape (..., prompts), none negative, each with a positive mean.
        below: likewise, the same prompt at the same index.

    Returns:
        Shape (..., prompts).
    """
    import numpy as np

    signs = [1.0] * len(above) + [-1.0] * len(below)
    terms = [
        sign * x / x.mean(-1, keepdims=True)
        for sign, x in zip(signs, (*above, *below), strict=True)
    ]
    influences: NDArray[np.float64] = np.sum(terms, axis=0)
    return influences


@cache
def student(degrees: int) -> float:
    """Student's t quantile of a two-sided 95% interval."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))


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
