"""Every decision of the draft process, and what it learns them from. Runs no model.

How far to draft, how many outcomes to guess and which, who drafts after a miss, and when a
speculation is long enough. None of them touches the output's distribution: they decide what is
drafted, and verification is exact for whatever was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.decoder import CacheOutcome
from impl.ssd.budgeting import Costs, Plan, plan
from impl.ssd.confidence import ConfidentFanOut
from impl.ssd.fallback import AdaptiveFallback, BackupName
from impl.ssd.fan_out import AdaptiveFanOut, FanOut, geometric, uniform
from impl.ssd.options import SaguaroOptions
from impl.ssd.speculation import Path

_FIXED = Plan(lookahead=4, budget=8, tokens_per_s=math.nan)  # stands in for `auto` without a clock
_SMOOTHING = 0.1  # weight of the newest round in a running mean


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification says about the speculation that it judged.

    Attributes:
        after: where the speculation came from.
        backup: what drafted it after a miss.
        confidences: of its tokens.
        accepted: k.
        rank: 1-based place of t* among what would have been guessed at position k; None beyond.
        missed: whether the outcome was not in the cache.
    """

    after: CacheOutcome | None
    backup: BackupName | None
    confidences: tuple[float, ...]
    accepted: int
    rank: int | None
    missed: bool


class Policy:
    """The decisions under one set of options.

    Attributes:
        lookahead: K, how many tokens to draft.
        budget: B, how many outcomes to guess for each sequence.
    """

    def __init__(self, options: SaguaroOptions, *, deterministic: bool) -> None:
        self.options = options
        self._deterministic = deterministic
        self._costs: Costs | None = None
        self._adaptive = AdaptiveFanOut()
        self._confident = ConfidentFanOut()
        self._fallback = AdaptiveFallback()
        self._verify_s: float | None = None
        self._tokens_per_round = 3.0
        self.lookahead, self.budget = 0, 0
        self._take(_FIXED)

    # What it learns.

    def take_costs(self, costs: Costs) -> None:
        """Learns the pass times that `auto` plans with."""
        self._costs = costs

    def observe(self, verdict: Verdict) -> None:
        """Learns from one verification."""
        drafted = len(verdict.confidences)
        self._adaptive.observe(verdict.after, verdict.accepted, drafted, verdict.rank)
        self._confident.observe(verdict.confidences, verdict.accepted, verdict.rank)
        emitted = verdict.accepted + 1
        self._fallback.observe(verdict.after, verdict.backup, emitted, verdict.missed)
        self._tokens_per_round += _SMOOTHING * (emitted - self._tokens_per_round)

    def observe_verification(self, seconds: float) -> None:
        """Learns how long the target kept the draft waiting."""
        old = seconds if self._verify_s is None else self._verify_s
        self._verify_s = old + _SMOOTHING * (seconds - old)

    def observe_backup(self, seconds: float) -> None:
        """Learns how long the neural backup took."""
        if self._verify_s:
            self._fallback.observe_backup_time(seconds / self._verify_s)

    # What it decides.

    def replan(self, batch_size: int) -> None:
        """Chooses K and B anew where they are automatic; called between rounds, not within one."""
        if self._costs is None or self._deterministic:
            return
        estimate = self._adaptive.estimate
        options = self.options
        self._take(
            plan(
                self._costs,
                estimate(CacheOutcome.HIT),
                estimate(CacheOutcome.MISS),
                batch_size,
                options.max_lookahead,
                options.max_budget,
            )
        )

    def _take(self, chosen: Plan) -> None:
        options = self.options
        self.lookahead = chosen.lookahead if options.lookahead == "auto" else options.lookahead
        self.budget = chosen.budget if options.budget == "auto" else options.budget

    def fan_out(self, after: CacheOutcome | None, confidences: list[float]) -> FanOut:
        """F_0..F_K for a speculation whose K tokens were drafted with these confidences."""
        options, lookahead = self.options, len(confidences)
        match options.fan_out:
            case "uniform":
                return uniform(self.budget, lookahead)
            case "geometric":
                return geometric(self.budget, lookahead, options.acceptance, options.exponent)
            case "adaptive":
                return self._adaptive.allocate(after, self.budget, lookahead)
            case "confidence":
                return self._confident.allocate(confidences, self.budget, options.least_chance)

    def backup(self, batch_size: int) -> BackupName:
        """Who drafts for the missing sequences of a batch."""
        if self.options.fallback != "adaptive":
            return self.options.fallback
        return "neural" if self._deterministic else self._fallback.choose(batch_size)

    def worth_extending(self, path: Path, pass_s: float) -> bool:
        """Whether one more token just in time brings more than its pass costs.

        It is emitted with the chance that all before it and itself are accepted; the pass delays
        the round's other tokens. Compared at the run's own rate of tokens per second.
        """
        if not self.options.return_short or self._deterministic or self._verify_s is None:
            return True
        reached = math.prod(self._confident.acceptance.of(c) for c in path.confidences)
        average = self._adaptive.estimate(CacheOutcome.MISS).acceptance
        return reached * average > pass_s / self._verify_s * self._tokens_per_round

    @property
    def critical_batch_size(self) -> float:
        """b* of the adaptive fallback; infinite while the neural backup always wins."""
        return self._fallback.critical_batch_size()
