"""What a token is worth and what a pass costs: how far to draft, what to build ahead, when to stop.

`lookahead: auto` and `budget: auto` follow one rule. Speed is tokens over time, and a ratio of two
sums is largest exactly when every part is taken whose own ratio exceeds it (Dinkelbach 1967). So,
at the present speed of S tokens a second, a token that is emitted with chance c is worth c / S
seconds, and is drafted, built ahead or verified where that exceeds the time it takes. With it the
speed of DESIGN section 4 is as high as the measured pass times allow, round by round.

Pure arithmetic; knows no model and no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Duration of a forward pass by the number of new tokens, measured at some, linear between.

    Attributes:
        tokens: the measured numbers, ascending.
        seconds: their durations, made ascending: none is above that of a wider pass, because other
            programs slow passes down and nothing makes them quicker.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> PassTimes:
        """From tokens -> seconds."""
        tokens = tuple(sorted(measured))
        descending = accumulate((measured[n] for n in reversed(tokens)), min)
        return cls(tokens, tuple(descending)[::-1])

    def at(self, tokens: int) -> float:
        """Seconds of a pass over `tokens` new tokens; extrapolates the outermost slopes."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        i = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        (n0, n1), (t0, t1) = self.tokens[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)

    def times(self, factor: float) -> PassTimes:
        """All of them so many times as long."""
        return PassTimes(self.tokens, tuple(factor * seconds for seconds in self.seconds))


@dataclass(frozen=True, slots=True)
class Costs:
    """What the passes of this machine cost.

    Attributes:
        verify_idle: target passes while the draft rests.
        verify_loaded: target passes while the draft works.
        draft_idle: draft passes while the target rests.
        draft_loaded: draft passes beside a working target.
    """

    verify_idle: PassTimes
    verify_loaded: PassTimes
    draft_idle: PassTimes
    draft_loaded: PassTimes

    @property
    def contention(self) -> float:
        """Seconds that the target loses for each second that the draft works, as first timed."""
        pairs = zip(self.verify_idle.seconds, self.verify_loaded.seconds, strict=True)
        return fmean(max(0.0, 1 - idle / loaded) for idle, loaded in pairs)


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds gained and lost, at one speed.

    Attributes:
        costs: measured pass times.
        batch_size: sequences advanced together.
        tokens_per_s: the present speed S of all of them.
    """

    costs: Costs
    batch_size: int
    tokens_per_s: float

    def verifying(self, chance: float, drafted: int) -> float:
        """Seconds gained by verifying a token behind `drafted` others; negative where it loses.

        Args:
            chance: that the token is emitted, all before it included.
            drafted: tokens of the same draft before it.
        """
        before = self.batch_size * (drafted + 1)
        times = self.costs.verify_idle
        more = (times.at(before + self.batch_size) - times.at(before)) / self.batch_size
        return chance / self.tokens_per_s - more

    def drafting(self, gains: Sequence[float]) -> float:
        """Seconds gained by a draft pass while the target waits, a row for each verifying gain."""
        return sum(gains) - self.costs.draft_idle.at(len(gains))

    def ahead(self, chance: float, gain: float, *, first: bool) -> float:
        """Seconds that a row of a pass beside the verification is expected to save.

        A branch is handed over as it is found, and what is not there by then is lost. One without
        any token is a miss, whose first token is drafted while the target waits if it is worth
        that, and else lost: its row saves the lesser of the two.

        Args:
            chance: that its outcome happens.
            gain: of verifying its token.
            first: whether the branch has no other token yet.
        """
        saved = max(0.0, gain)
        return chance * (min(saved, self.costs.draft_idle.at(1)) if first else saved)


def rows_of_a_pass(
    savings: Iterable[float],
    pass_times: PassTimes,
    *,
    remaining: float = math.inf,
    least: float = 0.0,
    given: int = 0,
) -> int:
    """How many rows the next pass beside the verification should have, the best ones first.

    Their number is the one that saves most a second: the first row of a pass is dear, the further
    ones are cheap. A pass that outlasts the verification delays the target by the rest.

    Args:
        savings: seconds that each row is expected to save, descending.
        pass_times: of the draft beside the target.
        remaining: seconds until the verification is expected to end.
        least: savings a second that a pass must exceed.
        given: rows that the pass has anyway; with them it is made whatever it saves.

    Returns:
        The rows besides those given; 0 where none is worth it.
    """
    best, best_rate, total = 0, 0.0 if given else least, 0.0
    for count, saving in enumerate(savings, start=1):
        total += saving
        seconds = pass_times.at(given + count)
        rate = (total - max(0.0, seconds - remaining)) / seconds
        if rate > best_rate:
            best, best_rate = count, rate
    return best
