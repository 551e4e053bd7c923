"""What the target does with drafted tokens: accepted counts and the draft's rank of what follows.

One round of a sequence is an outcome: how many of any number of drafted tokens would be accepted,
and the 1-based place of the emitted token among what the draft would have guessed there. Here it is
drawn from rates; `harness.simulation.traces` has that of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.errors import UsageError


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Independent rounds.

    Attributes:
        rates: chance that a drafted token is accepted, given those before it were, by position;
            the last one holds for all further positions. One rate is the i.i.d. process.
        exponent: r of `impl.ssd.fan_out.miss_probability`.
    """

    rates: tuple[float, ...]
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise UsageError("--acceptance: needs rates between 0 and 1, e.g. 0.8 or 0.9,0.8,0.7")
        if self.exponent < 0:
            raise UsageError("--exponent: must be at least 0")

    def survival(self, lookahead: int) -> np.ndarray:
        """P(k or more accepted) for k = 1..K."""
        last = self.rates[-1]
        rates = [*self.rates[:lookahead], *[last] * (lookahead - len(self.rates))]
        return np.cumprod(rates) if rates else np.ones(0)


class Outcomes(Protocol):
    """The outcomes of one group of configurations: `configurations` x `slots` each round."""

    def admit(self, free: np.ndarray) -> np.ndarray:
        """Tokens of the sequences that take these slots; 0 where none is left, and elsewhere."""

    def advance(self, emitted: np.ndarray) -> None:
        """Ends a round, in which each slot emitted so many tokens."""

    def accepted(self, turn: int) -> np.ndarray:
        """Tokens that would be accepted of as many as the group ever drafts."""

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:
        """Tokens of a draft that would have `lookahead`, one value for each configuration."""

    def beyond(
        self, turn: int, accepted: np.ndarray, drafted: np.ndarray, guesses: np.ndarray
    ) -> np.ndarray:
        """Whether the token emitted behind the accepted ones is not among so many guesses."""

    def next_accepted(self, turn: int, accepted: np.ndarray) -> np.ndarray:
        """Whether the token drafted behind a draft of which all were accepted is accepted too."""

    def uniform(self, turn: int) -> np.ndarray:
        """A further random number for each slot, uniform on [0, 1)."""


class SampledOutcomes:
    """Drawn from `Acceptance`; all configurations share the random numbers.

    Shared numbers make a configuration's result independent of the others in the sweep, and
    differences between configurations sharper.
    """

    def __init__(
        self,
        acceptances: Sequence[Acceptance],
        output_tokens: np.ndarray,
        longest: int,
        slots: int,
        rounds: int,
        seed: int,
    ) -> None:
        """Args: `output_tokens` is how many each configuration's sequences have."""
        self._draws = draws(seed, slots, rounds)
        self._tokens = output_tokens[:, None]
        self._survival = np.stack([each.survival(longest) for each in acceptances])
        self._next = np.array([each.rates[-1] for each in acceptances])[:, None]
        self._exponent = np.array([each.exponent for each in acceptances])[:, None]

    def admit(self, free: np.ndarray) -> np.ndarray:
        """There is always another sequence."""
        return np.asarray(self._tokens * free)

    def advance(self, emitted: np.ndarray) -> None:
        """Rounds are independent."""

    def accepted(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        drawn = self._draws[turn, 0]
        counts = np.zeros((len(self._survival), len(drawn)), dtype=np.int64)
        for column in self._survival.T:  # a few positions: cheaper than a third axis
            counts += drawn < column[:, None]
        return counts

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """All of them."""
        return lookahead[:, None]

    def beyond(
        self,
        turn: int,
        accepted: np.ndarray,  # noqa: ARG002
        drafted: np.ndarray,  # noqa: ARG002
        guesses: np.ndarray,
    ) -> np.ndarray:
        """P(beyond F) = (1 + F)^-r; see `impl.ssd.fan_out.miss_probability`."""
        missed: np.ndarray = self._draws[turn, 1] < (1.0 + guesses) ** -self._exponent
        return missed

    def next_accepted(self, turn: int, accepted: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """See `Outcomes`."""
        return np.asarray(self.uniform(turn) < self._next)

    def uniform(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.asarray(self._draws[turn, 2])


def draws(seed: int, slots: int, rounds: int) -> np.ndarray:
    """Uniform numbers by round, use and slot; a slot's do not depend on their number."""
    drawn = np.random.default_rng(seed).random((slots, 3, rounds))
    return np.ascontiguousarray(drawn.transpose(2, 1, 0))
