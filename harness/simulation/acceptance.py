"""What the target does with drafted tokens: accepted counts and the draft's rank of what follows.

One round of a sequence is an outcome: how many of any number of drafted tokens would be accepted,
and the 1-based place of the emitted token among what the draft would have guessed there. With both,
a round can be replayed under any lookahead and any fan-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from harness.errors import UsageError
from impl.ssd.fan_out import AdaptiveFanOut

if TYPE_CHECKING:
    import pandas as pd

_MOST = 64  # tokens; no draft is longer


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

    def accepted(self, turn: int) -> np.ndarray:
        """Tokens that would be accepted of as many as the group ever drafts."""

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:
        """Tokens of a draft that would have `lookahead`, one value for each configuration."""

    def beyond(self, turn: int, accepted: np.ndarray, guesses: np.ndarray) -> np.ndarray:
        """Whether the token emitted behind the accepted ones is not among so many guesses."""

    def next_accepted(self, turn: int) -> np.ndarray:
        """Whether the token drafted behind an accepted draft is accepted too."""

    def uniform(self, turn: int) -> np.ndarray:
        """A further random number for each slot, uniform on [0, 1)."""


class SampledOutcomes:
    """Drawn from `Acceptance`; all configurations share the random numbers.

    Shared numbers make a configuration's result independent of the others in the sweep, and
    differences between configurations sharper.
    """

    def __init__(
        self, acceptances: Sequence[Acceptance], longest: int, slots: int, rounds: int, seed: int
    ) -> None:
        self._draws = _draws(seed, slots, rounds)
        self._survival = np.stack([each.survival(longest) for each in acceptances])
        self._next = np.array([each.rates[-1] for each in acceptances])[:, None]
        self._exponent = np.array([each.exponent for each in acceptances])[:, None]

    def accepted(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        draws = self._draws[turn, 0]
        counts = np.zeros((len(self._survival), len(draws)), dtype=np.int64)
        for column in self._survival.T:  # a few positions: cheaper than a third axis
            counts += draws < column[:, None]
        return counts

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """All of them."""
        return lookahead[:, None]

    def beyond(self, turn: int, accepted: np.ndarray, guesses: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """P(beyond F) = (1 + F)^-r; see `impl.ssd.fan_out.miss_probability`."""
        missed: np.ndarray = self._draws[turn, 1] < (1.0 + guesses) ** -self._exponent
        return missed

    def next_accepted(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.asarray(self.uniform(turn) < self._next)

    def uniform(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.asarray(self._draws[turn, 2])


def _draws(seed: int, slots: int, rounds: int) -> np.ndarray:
    """Uniform numbers by round, use and slot; a slot's do not depend on their number."""
    drawn = np.random.default_rng(seed).random((slots, 3, rounds))
    return np.ascontiguousarray(drawn.transpose(2, 1, 0))


@dataclass(frozen=True)
class Trace:
    """The recorded rounds of a run, in order.

    Attributes:
        drafted: K of each round.
        accepted: of them.
        ranks: the draft's rank of the token emitted behind them; infinite where it was in no cache.
        as_recorded: no draft is longer than the recorded one; else it is continued.
    """

    drafted: np.ndarray
    accepted: np.ndarray
    ranks: np.ndarray
    as_recorded: bool = False

    @property
    def rate(self) -> float:
        """Accepted over judged tokens."""
        judged = np.minimum(self.accepted + 1, self.drafted).sum()
        return float(self.accepted.sum() / judged) if judged else 0.0

    @cached_property
    def estimate(self) -> Acceptance:
        """Independent rounds of the same rate, with the exponent that SSD would learn from it."""
        learned = AdaptiveFanOut()
        for drafted, accepted, rank in zip(self.drafted, self.accepted, self.ranks, strict=True):
            known = int(rank) if np.isfinite(rank) else None
            learned.observe(None, int(accepted), int(drafted), known)
        return Acceptance((self.rate,), learned.estimate(None).exponent)


class TracedOutcomes:
    """Replayed; every configuration sees the same rounds, each slot from a place of its own.

    A shorter draft than the recorded one is judged as recorded; the token behind it is the draft's
    own, so its rank is 1. Behind a longer one, of which all recorded tokens were accepted, further
    ones are accepted at the trace's rate.
    """

    def __init__(
        self, trace: Trace, configurations: int, slots: int, rounds: int, seed: int
    ) -> None:
        starts = np.linspace(0, len(trace.accepted), slots, endpoint=False).astype(int)
        where = (np.arange(rounds)[:, None] + starts) % len(trace.accepted)
        self._draws = _draws(seed, slots, rounds)
        self._recorded, self._ranks = trace.accepted[where], trace.ranks[where]
        whole = trace.accepted[where] == trace.drafted[where]
        further = _further(self._draws[:, 0], trace.rate)
        self._accepted = self._recorded + np.where(whole & (not trace.as_recorded), further, 0)
        self._drafted = trace.drafted[where] if trace.as_recorded else None
        self._next = trace.accepted[(where + 1) % len(trace.accepted)] > 0
        self._shape = (configurations, slots)

    def accepted(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.broadcast_to(self._accepted[turn], self._shape)

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:
        """See `Outcomes`; no more than was recorded, where that is asked for."""
        if self._drafted is None:
            return lookahead[:, None]
        return np.asarray(np.minimum(lookahead[:, None], self._drafted[turn]))

    def beyond(self, turn: int, accepted: np.ndarray, guesses: np.ndarray) -> np.ndarray:
        """See `Outcomes`."""
        ranks = np.where(accepted < self._recorded[turn], 1.0, self._ranks[turn])
        return np.asarray(ranks > guesses)

    def next_accepted(self, turn: int) -> np.ndarray:
        """Whether the next recorded round accepted its first token."""
        return np.broadcast_to(self._next[turn], self._shape)

    def uniform(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.asarray(self._draws[turn, 2])


def _further(draws: np.ndarray, rate: float) -> np.ndarray:
    """Accepted tokens at this rate until the first rejection."""
    if rate in (0.0, 1.0):
        return np.full(draws.shape, _MOST * int(rate))
    return np.asarray(np.minimum(np.log1p(-draws) / np.log(rate), _MOST).astype(int))


def read_trace(run: Path, method: str = "ssd") -> Trace:
    """The rounds of one method of a run directory.

    Raises:
        StoreError: no run directory.
        UsageError: the run has no drafted rounds of the method.
    """
    from harness.store import read_run

    rounds = read_run(run).rounds
    methods = rounds["item"].str.split("/").str[0]
    trace = trace_of(rounds[methods == method])
    if not trace.drafted.any():
        known = ", ".join(sorted(set(methods))) or "no rounds"
        raise UsageError(f"--trace {run}: no drafted round of {method}; it has {known}")
    return trace


def trace_of(rounds: pd.DataFrame) -> Trace:
    """These rows of rounds.parquet, in order of request and round.

    What became of a round's outcome is told by the round after it: its rank or, where that was not
    recorded, whether it was a hit, which then counts as the first guess.
    """
    ordered = rounds.sort_values(["item", "request_id", "round"], kind="stable")
    following = ordered.groupby(["item", "request_id"])[["rank", "cache"]].shift(-1)
    hit = (following["cache"] == "hit").map({True: 1.0, False: np.inf})
    ranks = following["rank"].astype(float).fillna(hit)
    return Trace(ordered["drafted"].to_numpy(), ordered["accepted"].to_numpy(), ranks.to_numpy())
