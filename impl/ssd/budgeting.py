"""Choosing lookahead and budget so that the predicted speed is highest (`budget: auto`).

Pure arithmetic over measured pass times and estimated acceptance; see `theory.py` for the speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from impl.ssd.fan_out import OutcomeEstimate, geometric
from impl.ssd.theory import (
    Backup,
    SpeedInputs,
    expected_tokens,
    hit_rate,
    long_run_hit_rate,
    predict,
)

BUDGETS = (0, 2, 4, 6, 8, 10, 12, 16, 24)  # 0 does not speculate ahead at all


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Duration of a forward pass by the number of new tokens, measured at some, linear between.

    Attributes:
        tokens: the measured numbers, ascending.
        seconds: their durations.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> PassTimes:
        """From tokens -> seconds."""
        tokens = tuple(sorted(measured))
        return cls(tokens, tuple(measured[n] for n in tokens))

    def at(self, tokens: int) -> float:
        """Seconds of a pass over `tokens` new tokens; extrapolates the outermost slopes."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        i = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        (n0, n1), (t0, t1) = self.tokens[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the passes of this machine cost.

    Attributes:
        verify_idle: target passes while the draft rests.
        verify_loaded: target passes while the draft works.
        draft: draft passes beside a working target.
    """

    verify_idle: PassTimes
    verify_loaded: PassTimes
    draft: PassTimes

    def verify_beside(self, build_s: float, tokens: int) -> float:
        """Seconds of a target pass that a build of `build_s` seconds slows down while it lasts."""
        idle, loaded = self.verify_idle.at(tokens), self.verify_loaded.at(tokens)
        return idle + (loaded - idle) * min(1.0, build_s / loaded)


@dataclass(frozen=True, slots=True)
class Plan:
    """Lookahead K and guesses B for each sequence, and the speed they promise (tokens/s each)."""

    lookahead: int
    budget: int
    tokens_per_s: float


def plan(
    costs: Costs,
    after_hit: OutcomeEstimate,
    after_miss: OutcomeEstimate,
    batch_size: int,
    max_lookahead: int,
    max_budget: int,
) -> Plan:
    """The fastest (K, B) by the formula of DESIGN section 4.

    Args:
        costs: measured pass times.
        after_hit: a and r of drafts that came from the cache.
        after_miss: a and r of drafts made just in time.
        batch_size: sequences advanced together.
        max_lookahead: largest K to consider.
        max_budget: largest B to consider.
    """
    choices = product(range(1, max_lookahead + 1), (b for b in BUDGETS if b <= max_budget))
    plans = [Plan(k, b, _speed(costs, after_hit, after_miss, batch_size, k, b)) for k, b in choices]
    return max(plans, key=lambda candidate: candidate.tokens_per_s)


def _speed(
    costs: Costs,
    after_hit: OutcomeEstimate,
    after_miss: OutcomeEstimate,
    batch_size: int,
    lookahead: int,
    budget: int,
) -> float:
    """Predicted tokens per second of one sequence."""
    build_s = (lookahead + 1) * costs.draft.at(budget * batch_size) if budget else 0.0
    verify_s = costs.verify_beside(build_s, (lookahead + 1) * batch_size)
    rates = [
        hit_rate(e.acceptance, e.exponent, geometric(budget, lookahead, e.acceptance, e.exponent))
        for e in (after_hit, after_miss)
    ]
    backup_s = lookahead * costs.draft.at(batch_size)
    inputs = SpeedInputs(
        hit_rate=long_run_hit_rate(*rates),
        tokens_on_hit=expected_tokens(after_hit.acceptance, lookahead),
        build_time=build_s / verify_s,
        backup=Backup(expected_tokens(after_miss.acceptance, lookahead), backup_s / verify_s),
        batch_size=batch_size,
    )
    return predict(inputs).speed / verify_s
