"""What is simulated: one method on one profile under one acceptance process, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from harness.errors import UsageError
from harness.messages import unknown
from harness.simulation.acceptance import Acceptance
from harness.simulation.profile import Profile
from harness.simulation.traces import Trace
from impl.ssd.fan_out import FanOut, geometric, uniform
from impl.ssd.theory import expected_tokens

Method = Literal["ar", "sd", "tree", "amusd", "pearl", "ssd"]
Fallback = Literal["neural", "fast", "adaptive"]
METHODS: tuple[Method, ...] = get_args(Method)
_ASYNCHRONOUS = ("amusd", "pearl", "ssd")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration.

    Attributes:
        method: whose schedule.
        profile: what passes cost.
        acceptance: what the target accepts, sampled or recorded.
        lookahead: K; the most tokens fed at once for amusd, the block for pearl, the depth of the
            trunk for tree. Ignored by ar.
        batch_size: sequences decoded together; a finished one is replaced at once.
        budget: B, guesses a sequence of the speculation cache (ssd).
        fan_out: how they are spread (ssd).
        fallback: who drafts after a miss (ssd).
        fast_acceptance, fast_lookahead: of the fast fallback's tokens.
        width: candidates at each position of the tree, the trunk's own included.
        context: mean tokens of a sequence, prompt and output so far.
        output_tokens: emitted before a sequence is replaced; a trace's requests have their own.
    """

    method: Method
    profile: Profile
    acceptance: Acceptance | Trace
    lookahead: int = 4
    batch_size: int = 1
    budget: int = 24
    fan_out: Literal["geometric", "uniform"] = "geometric"
    fallback: Fallback = "neural"
    fast_acceptance: float = 0.3
    fast_lookahead: int = 3
    width: int = 3
    context: int = 512
    output_tokens: int = 512

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"--methods: {unknown('method', self.method, METHODS)}")
        for name in ("lookahead", "batch_size", "width", "context", "output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: must be at least 1")
        if self.budget < 0:
            raise UsageError("--budget: must be at least 0")

    @property
    def drafted(self) -> int:
        """Most tokens of a draft."""
        return 0 if self.method == "ar" else self.lookahead

    @property
    def devices(self) -> int:
        """How many the method owns."""
        own = self.profile.draft_devices if self.method in _ASYNCHRONOUS else 0
        return self.profile.target_devices + own

    def guesses(self) -> FanOut:
        """F_0..F_K of the speculation cache."""
        if self.fan_out == "uniform":
            return uniform(self.budget, self.lookahead)
        rate = mean_rate(self.independent, self.lookahead)
        return geometric(self.budget, self.lookahead, rate, self.independent.exponent)

    @property
    def independent(self) -> Acceptance:
        """The acceptance process, or what it would be were a trace's rounds independent."""
        found = self.acceptance
        return found.estimate if isinstance(found, Trace) else found


def mean_rate(acceptance: Acceptance, lookahead: int) -> float:
    """The i.i.d. rate that accepts as many of K tokens on average."""
    wanted = 1 + float(acceptance.survival(lookahead).sum())
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, lookahead) < wanted else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a scenario came to. A simulation, not a measurement.

    Attributes:
        scenario: what was simulated.
        tokens_per_s: of all sequences together, prefill left out as in docs/metrics.md.
        acceptance_length: tokens emitted a verification of a sequence.
        hit_rate: of the speculation cache; None without one, first rounds left out.
        stall_rate: rounds that waited for a backup.
        round_ms: mean.
    """

    scenario: Scenario
    tokens_per_s: float
    acceptance_length: float
    hit_rate: float | None
    stall_rate: float
    round_ms: float
    label: str = "simulated"

    @property
    def tokens_per_s_per_user(self) -> float:
        """What one sequence sees."""
        return self.tokens_per_s / self.scenario.batch_size

    @property
    def tokens_per_s_per_device(self) -> float:
        """Over all devices that the method owns."""
        return self.tokens_per_s / self.scenario.devices
