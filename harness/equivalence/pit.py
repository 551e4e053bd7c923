"""The randomised probability integral transform, and tests that its values are uniform.

With the tokens ranked by the reference's probabilities p (most likely first, lower id first on a
tie), the token x becomes

    u = P(ranked above x) + U p(x),    U uniform on [0, 1) and independent of everything.

Given any prefix u is uniform if and only if x was drawn from p (Rosenblatt 1952; Smith 1985), so
over all prefixes the u are independent uniforms. Sees every kind of bias a little; the directed
tests (`harness.equivalence.martingale`) see the kinds that happen much better.

Any other fixed order of the tokens does as well. In the order of ids the u show faults of the
random numbers: a draw by inverse CDF goes through the ids in order, so a number that is used twice
favours low or high ids among equally likely tokens, which no ranking by probability can tell apart.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from harness.equivalence.hypothesis import TestOutcome

Floats = NDArray[np.float64]

LEAST_PAIRS = 50  # of neighbours, for the sum of their products to be close to normal


def fresh_uniforms(key: str, count: int) -> Floats:
    """U for the tokens of one output, float64 [count]; no decoder draws from this stream.

    Args:
        key: names the output, so that a certificate can be recomputed to the last digit.
        count: number of tokens.
    """
    digest = blake2b(key.encode(), digest_size=16, person=b"equivalence/pit").digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).random(count)


def transform(p_before: Floats, p_token: Floats, uniforms: Floats) -> Floats:
    """The value u of each token, [n], from the mass of the tokens that come before it."""
    return np.minimum(p_before + uniforms * p_token, 1.0)  # float32 rows may sum to 1 + 1e-7


def uniformity(u: Floats, stratum: str = "all", name: str = "pit") -> TestOutcome:
    """Kolmogorov-Smirnov test that the values [n] are uniform on [0, 1]; exact for n < 10,000."""
    found = stats.kstest(u, "uniform")
    return TestOutcome(name, stratum, len(u), float(found.statistic), float(found.pvalue))


def serial_correlation(
    u: Floats, output: NDArray[np.int64], name: str = "pit serial"
) -> TestOutcome | None:
    """Tests that neighbouring values are uncorrelated: uniform alone is not yet independent.

    Given u_t, the product (u_t - 1/2)(u_{t+1} - 1/2) has mean 0 and variance (u_t - 1/2)^2 / 12, so
    the sum of the products is a martingale and its z value standard normal.

    Args:
        u: [n], output after output.
        output: [n], which output each value belongs to; no pair spans two.
        name: of the test.

    Returns:
        None with fewer than `LEAST_PAIRS` pairs.
    """
    pairs = output[1:] == output[:-1]
    before, after = (u[:-1] - 0.5)[pairs], (u[1:] - 0.5)[pairs]
    if len(before) < LEAST_PAIRS:
        return None
    z = float((before * after).sum() / np.sqrt((before**2).sum() / 12))
    return TestOutcome(name, "all", len(before), z, float(2 * stats.norm.sf(abs(z))))


def rarest_token(p_tail: Floats) -> TestOutcome:
    """Whether some token was too unlikely to be drawn even once in so many.

    The mass ranked from a token on is at least 1 - u, so its minimum over n tokens falls below m
    with probability at most 1 - (1 - m)^n. An impossible token gives p-value 0.

    Args:
        p_tail: [n], mass of the tokens ranked from the emitted one on.
    """
    least = min(1.0, float(p_tail.min()))
    p_value = 1.0 if least == 1 else float(-np.expm1(len(p_tail) * np.log1p(-least)))
    return TestOutcome("rarest token", "all", len(p_tail), least, p_value)
