"""The recorded rounds of a run, and their replay under any lookahead and any fan-out.

What a round records is laid out along the text: at each token, whether it is the draft's own, and
its rank in the draft's list. A replay walks along that with its own lookahead and fan-out. At
temperature 0 it is exact, since the text and the draft's choices at each of its tokens do not
depend on how they were grouped into rounds. At temperature > 0 it is one possible course.

A token behind a wholly accepted draft was compared with no draft. With a rank it is the draft's own
if that is 1; without one it is so at the trace's rate, drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import UsageError
from harness.simulation.acceptance import Acceptance, draws
from impl.ssd.fan_out import AdaptiveFanOut

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trace:
    """Rounds of requests, one after the other; every array has a row for each round.

    Attributes:
        request: number of the round's request, ascending from 0.
        emitted: tokens, cut at the request's end.
        drafted: K of the round.
        accepted: of them.
        ranks: of the emitted token behind the accepted ones among the draft's guesses there, from
            1; infinite where it was none of them, NaN where that is not known.
        awaited: whether the target waited for this round's draft (SSD: no hit, no fast backup).
        as_recorded: rounds draft and emit what they did, whatever the lookahead. Without it they
            follow the scenario's.
    """

    request: np.ndarray
    emitted: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    ranks: np.ndarray
    awaited: np.ndarray
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


class _Text:
    """A trace laid out by token. `begins` and `ends` are by request, all else by token.

    Attributes:
        own: whether the draft would have proposed it.
        rank: its place in the draft's list, the draft's own token being the first.
        run: how many tokens from here on are the draft's own, to the request's end at most.
        round: number of the round that begins here; -1 where none does.
    """

    def __init__(self, trace: Trace, seed: int) -> None:
        which = np.repeat(np.arange(len(trace.emitted)), trace.emitted)
        first = np.cumsum(trace.emitted) - trace.emitted
        place = np.arange(len(which)) - first[which]
        accepted, drafted, rank = trace.accepted[which], trace.drafted[which], trace.ranks[which]
        judged, behind = place < drafted, place == accepted
        known = ~behind | judged | ~np.isnan(rank)
        drawn = np.random.default_rng(seed).random(len(which)) < trace.rate
        self.own = np.where(judged, ~behind, np.where(known, rank == 1, drawn))
        listed = np.where(np.isnan(rank), np.inf, rank) + judged  # the rejected one stands before
        self.rank = np.where(self.own, 1.0, listed)
        self.round = np.where(place == 0, which, -1)
        tokens = np.bincount(trace.request, trace.emitted).astype(int)
        self.ends = np.cumsum(tokens)
        self.begins = self.ends - tokens
        self.run = _runs(self.own, self.ends)


def _runs(own: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tokens until the next one that is not the draft's own, or until the request's end."""
    here, others = np.arange(len(own)), np.append(np.flatnonzero(~own), len(own))
    end = ends[np.searchsorted(ends, here, side="right")]
    return np.asarray(np.minimum(others[np.searchsorted(others, here)], end) - here)


class TracedOutcomes:
    """Replayed (see the module docstring); every configuration sees the same requests.

    Slots take the next request where one has ended. Endless, each slot begins at a place of its own
    and goes round; otherwise the slots share one queue, as in a run, until it is empty.
    """

    def __init__(
        self, trace: Trace, configurations: int, slots: int, rounds: int | None, seed: int
    ) -> None:
        """Args: `rounds` is how many are replayed; None is each request once."""
        self._text = _Text(trace, seed)
        self._requests = len(self._text.ends)
        self._endless = rounds is not None
        shape = (configurations, slots)
        self._draws = draws(seed, slots, len(self._text.own) if rounds is None else rounds)
        starts = np.arange(slots) * self._requests // slots
        self._next = np.broadcast_to(starts, shape).copy() if self._endless else None
        self._taken = np.zeros(configurations, dtype=int)
        self._at = np.zeros(shape, dtype=int)  # the next token of each slot's request

    def admit(self, free: np.ndarray) -> np.ndarray:
        """See `Outcomes`."""
        if self._next is not None:
            request = self._next % self._requests
            self._next += free
        else:
            request = self._taken[:, None] + np.cumsum(free, axis=1) - 1
            self._taken += free.sum(axis=1)
        there = free & (request < self._requests)
        request = np.minimum(request, self._requests - 1)
        self._at = np.where(there, self._text.begins[request], self._at)
        tokens = self._text.ends[request] - self._text.begins[request]
        return np.asarray(np.where(there, tokens, 0))

    def advance(self, emitted: np.ndarray) -> None:
        """See `Outcomes`."""
        self._at = np.minimum(self._at + emitted, len(self._text.own) - 1)

    def accepted(self, turn: int) -> np.ndarray:  # noqa: ARG002
        """See `Outcomes`."""
        return np.asarray(self._text.run[self._at])

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """All of them."""
        return lookahead[:, None]

    def beyond(
        self,
        turn: int,  # noqa: ARG002
        accepted: np.ndarray,
        drafted: np.ndarray,
        guesses: np.ndarray,
    ) -> np.ndarray:
        """The draft's own token is no guess where it was just rejected."""
        rank = self._text.rank[self._behind(accepted)] - (accepted < drafted)
        return np.asarray(rank > guesses)

    def next_accepted(self, turn: int, accepted: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """See `Outcomes`."""
        return np.asarray(self._text.own[self._behind(accepted)])

    def uniform(self, turn: int) -> np.ndarray:
        """See `Outcomes`."""
        return np.asarray(self._draws[turn, 2])

    def _behind(self, accepted: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(self._at + accepted, len(self._text.own) - 1))


class RecordedOutcomes(TracedOutcomes):
    """Rounds as they were: what was drafted, what was emitted, which drafts were awaited."""

    def __init__(
        self, trace: Trace, configurations: int, slots: int, rounds: int | None, seed: int
    ) -> None:
        """See `TracedOutcomes`."""
        super().__init__(trace, configurations, slots, rounds, seed)
        self._trace = trace

    def accepted(self, turn: int) -> np.ndarray:  # noqa: ARG002
        """See `Outcomes`."""
        return np.asarray(self._trace.emitted[self._round(self._at)] - 1)

    def drafted(self, turn: int, lookahead: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """See `Outcomes`."""
        return np.asarray(self._trace.drafted[self._round(self._at)])

    def beyond(
        self,
        turn: int,  # noqa: ARG002
        accepted: np.ndarray,
        drafted: np.ndarray,  # noqa: ARG002
        guesses: np.ndarray,  # noqa: ARG002
    ) -> np.ndarray:
        """Whether the next round's draft was awaited."""
        return np.asarray(self._trace.awaited[self._round(self._behind(accepted + 1))])

    def _round(self, at: np.ndarray) -> np.ndarray:
        return np.asarray(self._text.round[at])


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
    """These rows of rounds.parquet, in order of item, first step of the request, and round.

    What became of a round's outcome is told by the round after it: its rank or, where that was not
    recorded, whether it was a hit, which then counts as the first guess, or a miss of some guesses.
    """
    keys = ["item", "request_id"]
    begun = rounds.assign(begun=rounds.groupby(keys)["step"].transform("min"))
    ordered = begun.sort_values(["item", "begun", "request_id", "round"], kind="stable")
    following = ordered.groupby(keys, sort=False)[["rank", "cache", "guesses"]].shift(-1)
    told = following["cache"].map({"hit": 1.0, "miss": np.inf})
    told = told.where(following["guesses"].astype(float) > 0)
    ranks = following["rank"].astype(float).fillna(told)
    found = ordered["cache"] == "hit"
    return Trace(
        request=ordered.groupby(keys, sort=False).ngroup().to_numpy(),
        emitted=ordered["emitted"].to_numpy(),
        drafted=ordered["drafted"].to_numpy(),
        accepted=ordered["accepted"].to_numpy(),
        ranks=ranks.to_numpy(dtype=float),
        awaited=(~(found | (ordered["backup"] == "fast"))).to_numpy(),
    )
