"""How likely each outcome of a verification is, by the draft's confidence in its own tokens.

A drafted token that the draft gave probability 0.99 is hardly ever rejected, so a guess for its
rejection is wasted. Where the draft hesitated, guesses pay. Acceptance as a function of confidence,
and how t* ranks among the draft's tokens, are learned from the run's own verifications.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from impl.ssd.fan_out import FanOut, miss_probability

BINS = 10  # of confidence, equally wide
PRIOR_STRENGTH = 4.0  # a prior weighs as much as this many observations
MAX_RANK = 32


class AcceptanceByConfidence:
    """P(accept | the draft's probability of the token): a Beta mean a bin, first as confident."""

    def __init__(self) -> None:
        self._accepted = [PRIOR_STRENGTH * (i + 0.5) / BINS for i in range(BINS)]
        self._decided = [PRIOR_STRENGTH] * BINS

    def of(self, confidence: float) -> float:
        """The chance that a token drafted with this confidence is accepted."""
        i = _bin(confidence)
        return self._accepted[i] / self._decided[i]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Learns from a draft of which the first `accepted` tokens were accepted, the next not."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._decided[_bin(confidence)] += 1
            self._accepted[_bin(confidence)] += i < accepted


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(confidence * BINS))


class RankProfile:
    """P(t* is the draft's j-th likeliest token), j = 1..MAX_RANK; prior: the power law at r = 1."""

    def __init__(self) -> None:
        tail = [miss_probability(j, 1.0) for j in range(MAX_RANK + 1)]
        self._count = [PRIOR_STRENGTH * (tail[j] - tail[j + 1]) for j in range(MAX_RANK)]
        self._total = PRIOR_STRENGTH

    def of(self, rank: int) -> float:
        """The chance of a 1-based rank."""
        return self._count[rank - 1] / self._total

    def observe(self, rank: int | None) -> None:
        """Learns one rank; None, or one beyond MAX_RANK, only makes the others rarer."""
        self._total += 1
        if rank is not None and rank <= MAX_RANK:
            self._count[rank - 1] += 1


class ConfidentFanOut:
    """Spends the budget on the likeliest outcomes (k, rank), and not at all on hopeless ones."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceByConfidence()
        self._rejected = RankProfile()
        self._bonus = RankProfile()

    def observe(self, confidences: Sequence[float], accepted: int, rank: int | None) -> None:
        """Learns from one verification.

        Args:
            confidences: of the K drafted tokens.
            accepted: k.
            rank: 1-based place of t* among what would have been guessed at position k.
        """
        self.acceptance.observe(confidences, accepted)
        (self._bonus if accepted == len(confidences) else self._rejected).observe(rank)

    def allocate(self, confidences: Sequence[float], budget: int, least: float = 0.0) -> FanOut:
        """F_0..F_K: the `budget` likeliest outcomes but for those with a chance below `least`."""
        ends = self._ends(confidences)
        fan_out = [0] * len(ends)

        def chance(k: int) -> float:
            return self._chance(ends, k, fan_out[k] + 1)

        queue = [(-chance(k), k) for k in range(len(ends))]
        heapq.heapify(queue)
        for _ in range(budget):
            negative, k = queue[0]
            if -negative <= least:
                break
            fan_out[k] += 1
            heapq.heapreplace(queue, (-chance(k), k))
        return tuple(fan_out)

    def chances(self, confidences: Sequence[float], positions: Sequence[int]) -> list[float]:
        """The chance of each guess: its position k, and its rank among the guesses there.

        Args:
            confidences: of the K drafted tokens.
            positions: k of each guess, those of one position in the order of their ranks.
        """
        ends, ranks = self._ends(confidences), [0] * (len(confidences) + 1)
        found = []
        for k in positions:
            ranks[k] += 1
            found.append(self._chance(ends, k, ranks[k]))
        return found

    def _chance(self, ends: Sequence[float], k: int, rank: int) -> float:
        profile = self._bonus if k == len(ends) - 1 else self._rejected
        return ends[k] * profile.of(rank) if rank <= MAX_RANK else 0.0

    def _ends(self, confidences: Sequence[float]) -> list[float]:
        """P(k) for k = 0..K: the chance that exactly k tokens are accepted."""
        reached, ends = 1.0, []
        for confidence in confidences:
            accepted = self.acceptance.of(confidence)
            ends.append(reached * (1 - accepted))
            reached *= accepted
        return [*ends, reached]
