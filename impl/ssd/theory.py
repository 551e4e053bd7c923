"""What SSD should reach: hit rate, tokens a round and speed, from measured quantities.

The formulas of DESIGN section 4. Times are in units of one verification, so a speed is tokens per
verification time; dividing by the same of autoregressive decoding gives the speedup over it. With
a hit rate of 0, and drafting as the backup, they describe plain speculative decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from impl.ssd.fan_out import miss_probability, outcome_probabilities


@dataclass(frozen=True, slots=True)
class Backup:
    """What a cache miss costs and brings.

    Attributes:
        tokens: E_miss, tokens emitted by the verification of a backup's draft.
        time: T_b, time to draft it, on the critical path.
    """

    tokens: float
    time: float


@dataclass(frozen=True, slots=True)
class SpeedInputs:
    """What the speed of SSD depends on.

    Attributes:
        hit_rate: h, of one sequence.
        tokens_on_hit: E_hit, tokens emitted by the verification of a cached speculation.
        build_time: T_p, time to build the speculation cache beside the verification.
        backup: what happens after a miss.
        batch_size: b, sequences advanced together.
    """

    hit_rate: float
    tokens_on_hit: float
    build_time: float
    backup: Backup
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """What SSD should do.

    Attributes:
        stall_rate: chance that a round waits for the backup: that any of b sequences misses.
        tokens: emitted per sequence and round.
        time: of a round.
    """

    stall_rate: float
    tokens: float
    time: float

    @property
    def speed(self) -> float:
        """Tokens per sequence and verification time."""
        return self.tokens / self.time


def expected_tokens(acceptance: float, lookahead: int) -> float:
    """E: tokens emitted by verifying K drafted ones, bonus included: 1 + a + ... + a^K."""
    return sum(acceptance**k for k in range(lookahead + 1))


def hit_rate(acceptance: float, exponent: float, fan_out: Sequence[int]) -> float:
    """Chance that the outcome is among the guesses: h = sum_k P(k) (1 - miss(F_k))."""
    outcomes = outcome_probabilities(acceptance, len(fan_out) - 1)
    return sum(
        probability * (1 - miss_probability(guesses, exponent))
        for probability, guesses in zip(outcomes, fan_out, strict=True)
    )


def predict(inputs: SpeedInputs) -> Prediction:
    """Tokens and time of a round: [h E_hit + (1-h) E_miss] in [H max(1, T_p) + (1-H)(1 + T_b)].

    H = h^b is the chance that all b sequences hit; they are taken as independent.
    """
    all_hit = inputs.hit_rate**inputs.batch_size
    time = all_hit * max(1.0, inputs.build_time) + (1 - all_hit) * (1 + inputs.backup.time)
    return Prediction(1 - all_hit, _tokens(inputs, inputs.backup), time)


def _tokens(inputs: SpeedInputs, backup: Backup) -> float:
    return inputs.hit_rate * inputs.tokens_on_hit + (1 - inputs.hit_rate) * backup.tokens


def critical_batch_size(inputs: SpeedInputs, fast: Backup) -> float:
    """b*: from this batch size on the fast backup beats `inputs.backup`, the neural one.

    The larger the batch, the more rounds stall, and the more the time of the backup weighs against
    the tokens it brings. Where the two predicted speeds are equal is linear in h^b.

    Returns:
        b* >= 1, not rounded; infinity when the fast backup never wins.
    """
    neural_tokens, fast_tokens = _tokens(inputs, inputs.backup), _tokens(inputs, fast)
    # Fast wins where all_hit * loss <= (1 - all_hit) * gain.
    loss = (neural_tokens - fast_tokens) * max(1.0, inputs.build_time)
    gain = fast_tokens * (1 + inputs.backup.time) - neural_tokens * (1 + fast.time)
    if gain <= 0 or inputs.hit_rate == 1:
        return math.inf
    if loss <= 0 or inputs.hit_rate == 0:
        return 1.0
    return max(1.0, math.log(gain / (gain + loss)) / math.log(inputs.hit_rate))
