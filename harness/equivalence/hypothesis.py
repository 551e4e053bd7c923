"""The outcome of one statistical test, and Holm's correction over all tests of a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One test of the hypothesis that every token was drawn from the target's distribution.

    Attributes:
        test: which one (docs/equivalence.md).
        stratum: the tokens that it looked at.
        n: how many.
        statistic: a z value, or the test's own statistic.
        p_value: of the hypothesis, this test alone.
        variance: mean of p(A)(1 - p(A)) over the tokens, for a test on sets A; None for others.
        adjusted: p-value after Holm's correction over the whole certificate.
        smallest_bias: total variation toward A that this test sees with 95% power.
    """

    __test__ = False  # no test class of pytest's

    test: str
    stratum: str
    n: int
    statistic: float
    p_value: float
    variance: float | None = None
    adjusted: float = 1.0
    smallest_bias: float | None = None


def holm(p_values: Sequence[float]) -> NDArray[np.float64]:
    """Holm's adjusted p-values (1979): rejecting those <= alpha errs at all with chance <= alpha.

    Valid whatever the dependence between the tests.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted
