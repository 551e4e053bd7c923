"""Every decision of the draft process, and what it learns them from. Runs no model.

How far to draft, how many outcomes to guess and which, who drafts after a miss, and when a
speculation is long enough. None of them touches the output's distribution: they decide what is
drafted, and verification is exact for whatever was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.decoder import CacheOutcome
from impl.ssd.budgeting import Costs, Prices, rows_of_a_pass
from impl.ssd.confidence import ConfidentFanOut
from impl.ssd.fallback import AdaptiveFallback, BackupName
from impl.ssd.fan_out import AdaptiveFanOut, FanOut, geometric, uniform
from impl.ssd.options import SaguaroOptions
from impl.ssd.speculation import Path
from impl.ssd.speculation_cache import Outcome

_LOOKAHEAD, _BUDGET = 4, 8  # stand in for `auto` where no pass was timed
_MEMORY = 0.95  # weight of the past at each new round, in running sums
_PRIOR_TOKENS, _PRIOR_ROUNDS = 3.0, 5  # tokens a round believed at first; its weight


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
    """The decisions under one set of options."""

    def __init__(self, options: SaguaroOptions, *, deterministic: bool, replicas: int = 1) -> None:
        """Args: `replicas` of the draft share out the guesses, each with a budget of its own."""
        self.options = options
        self._replicas = replicas
        self._deterministic = deterministic
        self._costs: Costs | None = None
        self._prices: Prices | None = None
        self._adaptive = AdaptiveFanOut()
        self._confident = ConfidentFanOut()
        self._fallback = AdaptiveFallback()
        self._speed = _Ratio(0.0, 0.0)  # tokens, seconds
        self._verify_s = _Ratio(0.0, 0.0)  # seconds, verifications
        self._drift = _Ratio(1.0, 1.0)  # seconds, as expected from the pass times
        self._pass_drift = _Ratio(1.0, 1.0)  # the same of passes beside the verification
        self._contention = _Ratio(0.0, 1.0)  # seconds the target lost, that the draft worked beside
        self._fast_acceptance = _Ratio(2.0, 4.0)  # accepted, decided

    # What it learns.

    def take_costs(self, costs: Costs, batch_size: int) -> None:
        """Learns the pass times that `auto` goes by, for batches of this size."""
        self._costs = costs
        drafted = round(_PRIOR_TOKENS)
        seconds = costs.verify_idle.at(batch_size * (drafted + 1))
        seconds += drafted * costs.draft_idle.at(batch_size)
        working = _PRIOR_ROUNDS * costs.verify_loaded.at(batch_size * (drafted + 1))
        self._contention = _Ratio(working * costs.contention, working)
        tokens = batch_size * _PRIOR_TOKENS
        self._speed = _Ratio(_PRIOR_ROUNDS * tokens, _PRIOR_ROUNDS * seconds)
        self._price(batch_size)

    def observe(self, verdict: Verdict) -> None:
        """Learns from one verification."""
        drafted = len(verdict.confidences)
        self._adaptive.observe(verdict.after, verdict.accepted, drafted, verdict.rank)
        self._confident.observe(verdict.confidences, verdict.accepted, verdict.rank)
        backup = verdict.backup if drafted else None
        emitted = verdict.accepted + 1
        self._fallback.observe(verdict.after, backup, emitted, verdict.missed)

    def observe_round(self, tokens: int, seconds: float, batch_size: int) -> None:
        """Learns what a whole round took, and how many tokens all its sequences emitted."""
        self._speed.add(tokens, seconds)
        self._price(batch_size)

    def observe_verification(self, seconds: float, tokens: int, working: float) -> None:
        """Learns how long the target took to verify `tokens` tokens of all sequences.

        The draft worked beside it for `working` of these seconds.
        """
        self._verify_s.add(seconds, 1.0)
        if self._costs is not None:
            self._drift.add(seconds, self._costs.verify_loaded.at(tokens))
            self._contention.add(seconds - self._costs.verify_idle.at(tokens), working)

    def observe_pass(self, seconds: float, rows: int) -> None:
        """Learns how long a draft pass over `rows` rows took beside the target."""
        if self._costs is not None:
            self._pass_drift.add(seconds, self._costs.draft_loaded.at(rows))

    def expected_verification(self, tokens: int) -> float:
        """Seconds that verifying `tokens` tokens should take; endless where nothing was timed."""
        if self._costs is None:
            return math.inf
        return self._drift.value * self._costs.verify_loaded.at(tokens)

    def observe_backup(self, seconds: float) -> None:
        """Learns how long the neural backup took."""
        if self._verify_s.below:
            self._fallback.observe_backup_time(seconds / self._verify_s.value)

    def observe_fast(self, accepted: int, drafted: int) -> None:
        """Learns how often tokens of the fast backup are accepted."""
        self._fast_acceptance.add(accepted, min(accepted + 1, drafted))

    def _price(self, batch_size: int) -> None:
        if self._costs is not None and not self._deterministic:
            self._prices = Prices(self._costs, batch_size, self._speed.value)

    # What it decides.

    @property
    def lookahead(self) -> int:
        """K, the most tokens to draft."""
        if self.options.lookahead != "auto":
            return self.options.lookahead
        return _LOOKAHEAD if self._prices is None else self.options.max_lookahead

    @property
    def budget(self) -> int:
        """B, the most outcomes to guess for each sequence."""
        if self.options.budget != "auto":
            return self.options.budget
        return _BUDGET if self._prices is None else self.options.max_budget

    def fan_out(self, after: CacheOutcome | None, confidences: list[float]) -> FanOut:
        """F_0..F_K for a speculation whose K tokens were drafted with these confidences."""
        options, lookahead = self.options, len(confidences)
        budget = self._replicas * self.budget
        match options.fan_out:
            case "uniform":
                return uniform(budget, lookahead)
            case "geometric":
                return geometric(budget, lookahead, options.acceptance, options.exponent)
            case "adaptive":
                return self._adaptive.allocate(after, budget, lookahead)
            case "confidence":
                return self._confident.allocate(confidences, budget, options.least_chance)

    def chances(self, confidences: list[float], outcomes: Sequence[Outcome]) -> list[float]:
        """The chance of each guessed outcome; they come by position, the likeliest first."""
        return self._confident.chances(confidences, [outcome.accepted for outcome in outcomes])

    def reach(self, path: Path, confidence: float) -> float:
        """The chance that a path's tokens and one more of this confidence are all accepted."""
        return path.reach * self._confident.acceptance.of(confidence)

    def backup(self, batch_size: int, found: bool) -> BackupName:
        """Who drafts for a missing sequence; `found`: its text has an n-gram to continue."""
        if self.options.fallback != "adaptive":
            return self.options.fallback
        return "neural" if self._deterministic else self._fallback.choose(batch_size, found)

    def fast_length(self, wanted: int) -> int:
        """How many of the fast backup's tokens are worth their verification, one at least."""
        if self.options.lookahead != "auto" or self._prices is None:
            return wanted
        length, chance = 1, self._fast_acceptance.value
        while length < wanted and self._prices.verifying(chance ** (length + 1), length) > 0:
            length += 1
        return min(length, wanted)

    def worth_drafting(self, paths: Sequence[Path], after: Sequence[CacheOutcome | None]) -> bool:
        """Whether a pass while the target waits brings more than it costs: a token of each path.

        For hits alone no pass is made: a hit is handed over as it was found.
        """
        if not self.options.return_short or self._prices is None:
            return True
        if all(found is CacheOutcome.HIT for found in after):
            return False
        gains = [self._gain(*pair) for pair in zip(paths, after, strict=True)]
        return self._prices.drafting(gains) > 0

    def worth_verifying(self, path: Path, after: CacheOutcome | None) -> bool:
        """Whether a path's next token would be worth its verification."""
        return self.options.lookahead != "auto" or self._gain(path, after) > 0

    def likeliest(self, paths: Sequence[Path], given: int, remaining: float) -> list[Path]:
        """Which paths a pass beside the verification extends.

        Args:
            paths: those that have a token to feed and want another.
            given: rows that the pass has anyway.
            remaining: seconds until the verification is expected to end.
        """
        prices = self._prices
        if self.options.build == "all" or prices is None:
            return list(paths)
        savings = {
            path: prices.ahead(
                path.chance, self._gain(path, CacheOutcome.HIT), first=not path.drafted
            )
            for path in paths
        }
        ranked = sorted(paths, key=savings.__getitem__, reverse=True)
        count = rows_of_a_pass(
            map(savings.__getitem__, ranked),
            prices.costs.draft_loaded.times(self._pass_drift.value),
            remaining=remaining,
            least=self.contention if self.options.budget == "auto" else -math.inf,
            given=given,
        )
        return ranked[:count]

    @property
    def contention(self) -> float:
        """Seconds that the target loses for each second that the draft works beside it."""
        return max(0.0, self._contention.value)

    def _gain(self, path: Path, after: CacheOutcome | None) -> float:
        """Seconds gained by verifying the path's next token, which nobody has seen yet."""
        if self._prices is None:
            return math.inf
        chance = path.reach * self._adaptive.acceptance(after)
        return self._prices.verifying(chance, path.drafted)

    @property
    def critical_batch_size(self) -> float:
        """b* of the adaptive fallback; infinite while the neural backup always wins."""
        return self._fallback.critical_batch_size()


class _Ratio:
    """A ratio of two running sums that forget."""

    def __init__(self, above: float, below: float) -> None:
        self.above, self.below = above, below

    @property
    def value(self) -> float:
        return self.above / self.below

    def add(self, above: float, below: float) -> None:
        self.above = _MEMORY * self.above + above
        self.below = _MEMORY * self.below + below
