"""How many outcomes to guess at each position: uniform, geometric and adaptive fan-out.

A verification of K drafted tokens ends in an outcome (k, t*). A fan-out F_0..F_K says how many
guesses of t* the speculation cache holds for each k. Pure arithmetic: knows no model and no token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.decoder import CacheOutcome

FanOut = tuple[int, ...]


def outcome_probabilities(acceptance: float, lookahead: int) -> tuple[float, ...]:
    """P(k) for k = 0..K: a^k (1 - a) for k < K, and a^K for the fully accepted draft."""
    rejected = (acceptance**k * (1 - acceptance) for k in range(lookahead))
    return (*rejected, acceptance**lookahead)


def miss_probability(fan_out: int, exponent: float) -> float:
    """P(the draft's rank of t* exceeds F) = (1 + F)^-r.

    The power law F^-r of DESIGN section 4, shifted by one so that it is a distribution over the
    ranks 1, 2, ...: no guess misses for sure, and one guess can hit.
    """
    return float((1 + fan_out) ** -exponent)


def uniform(budget: int, lookahead: int) -> FanOut:
    """The same number of guesses at each of the K + 1 positions; a remainder goes to the first."""
    return _round_to_budget(np.ones(lookahead + 1), budget)


def geometric(budget: int, lookahead: int, acceptance: float, exponent: float) -> FanOut:
    """The fan-out that minimises sum_k P(k) F_k^-r under sum_k F_k = budget (DESIGN section 4).

    The closed form F_k proportional to P(k)^(1/(1+r)), which is F_0 a^(k/(1+r)) for k < K and
    F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)) for k = K, written so that a = 0 and a = 1 divide by nothing.

    Args:
        budget: guesses in all, B >= 0.
        lookahead: drafted tokens, K >= 0.
        acceptance: a in [0, 1], the chance that a drafted token is accepted.
        exponent: r >= 0, how fast misses die out with the fan-out.

    Returns:
        F_0..F_K, none negative, with sum exactly B (largest remainder).
    """
    probabilities = np.array(outcome_probabilities(acceptance, lookahead))
    return _round_to_budget(probabilities ** (1 / (1 + exponent)), budget)


def _round_to_budget(weights: np.ndarray, budget: int) -> FanOut:
    """Shares `budget` out in proportion to `weights`, by largest remainder, lower index first."""
    shares = budget * weights / weights.sum()
    whole = np.floor(shares).astype(int)
    largest = np.argsort(whole - shares, kind="stable")
    whole[largest[: budget - whole.sum()]] += 1
    return tuple(whole.tolist())


@dataclass(frozen=True, slots=True)
class OutcomeEstimate:
    """What a fan-out is computed from.

    Attributes:
        acceptance: a, the chance that a drafted token is accepted given those before it were.
        exponent: r of `miss_probability`.
    """

    acceptance: float
    exponent: float


@dataclass(frozen=True, slots=True)
class OutcomePrior:
    """What is believed before the first observation, and how many observations that is worth.

    Attributes:
        acceptance: mean of the Beta prior of a.
        exponent: mode of the Gamma prior of r.
        strength: weight of each prior, in observations.
    """

    acceptance: float = 0.75
    exponent: float = 1.0
    strength: float = 10.0


class AdaptiveFanOut:
    """Geometric fan-out with a and r estimated from the run, apart after a hit and after a miss.

    a is the mean of a Beta posterior over accept/reject decisions. r is the mode of the posterior
    of the power law over the draft's rank of t*, ranks above `max_rank` counting as censored there:
    the tail beyond any affordable fan-out says nothing about where to spend the budget.
    """

    def __init__(self, prior: OutcomePrior | None = None, max_rank: int = 64) -> None:
        prior = prior or OutcomePrior()
        self._statistics = {state: _Statistics(prior, max_rank) for state in CacheOutcome}

    def observe(
        self, after: CacheOutcome | None, accepted: int, lookahead: int, rank: int | None
    ) -> None:
        """Learns from one verification.

        Args:
            after: whether the verified draft came from a cache hit or a miss. None, a sequence's
                first round, counts as a miss: it too was drafted just in time.
            accepted: k.
            lookahead: K of that draft.
            rank: 1-based place of t* among the tokens that the draft would have guessed at position
                k, most likely first; None when it is beyond those that were ranked.
        """
        self._of(after).add(accepted, lookahead, rank)

    def estimate(self, after: CacheOutcome | None) -> OutcomeEstimate:
        """The present a and r for a draft that came from a hit or a miss."""
        return self._of(after).estimate()

    def acceptance(self, after: CacheOutcome | None) -> float:
        """The present a alone, which costs nothing to know."""
        return self._of(after).acceptance

    def allocate(self, after: CacheOutcome | None, budget: int, lookahead: int) -> FanOut:
        """The geometric fan-out for the draft now under verification."""
        now = self.estimate(after)
        return geometric(budget, lookahead, now.acceptance, now.exponent)

    def _of(self, after: CacheOutcome | None) -> _Statistics:
        return self._statistics[after or CacheOutcome.MISS]


class _Statistics:
    """Sufficient statistics of a and r in one state."""

    def __init__(self, prior: OutcomePrior, max_rank: int) -> None:
        self._prior = prior
        self._accepted = 0
        self._decided = 0
        self._ranks = np.zeros(max_rank)  # count of rank 1, 2, ..., max_rank
        self._censored = 0

    def add(self, accepted: int, lookahead: int, rank: int | None) -> None:
        self._accepted += accepted
        self._decided += min(accepted + 1, lookahead)
        if rank is None or rank > len(self._ranks):
            self._censored += 1
        else:
            self._ranks[rank - 1] += 1

    @property
    def acceptance(self) -> float:
        strength = self._prior.strength
        successes = strength * self._prior.acceptance + self._accepted
        return successes / (strength + self._decided)

    def estimate(self) -> OutcomeEstimate:
        return OutcomeEstimate(self.acceptance, self._fit_exponent())

    def _fit_exponent(self) -> float:
        """Mode of the posterior of r, where the derivative of its concave logarithm is 0.

        log P(rank = R) = -r log R + log(1 - exp(-r d)) with d = log(1 + 1/R); a censored rank has
        -r log(1 + max_rank); the Gamma prior has strength (log r - r / r_prior).
        """
        rank = np.arange(1, len(self._ranks) + 1)
        gap = np.log1p(1 / rank)
        strength = self._prior.strength
        slope = self._ranks @ np.log(rank) + self._censored * np.log(1 + len(rank))
        slope += strength / self._prior.exponent

        low, high = 1e-3, 50.0
        while high - low > 1e-4 * low:  # the derivative falls with r
            r = (low * high) ** 0.5
            if strength / r + self._ranks @ (gap / np.expm1(r * gap)) > slope:
                low = r
            else:
                high = r
        return low
