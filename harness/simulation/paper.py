"""The SSD paper's own speeds, from one set of stated assumptions (arXiv 2603.03251, batch 1).

Each pair has one free number, its acceptance; all else is shared by both pairs and all methods.
Lookaheads are not inputs: each method has the one that is fastest in the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.simulation.acceptance import Acceptance
from harness.simulation.profile import load_profile
from harness.simulation.roofline import Efficiency
from harness.simulation.scenario import Method, Scenario
from harness.simulation.simulate import LOOKAHEADS, fastest

_ROUNDS = 10_000


@dataclass(frozen=True, slots=True)
class Published:
    """One pair of the paper.

    Attributes:
        profile: ours for its setting, four H100 for the target and one for the draft.
        acceptance: assumed, the pair's one free number.
        tokens_per_s: method -> published.
    """

    profile: str
    acceptance: float
    tokens_per_s: Mapping[Method, float]


PAIRS: Mapping[str, Published] = {
    "llama-3.1-70b": Published(
        "h100x4+1-llama-3.1-70b", 0.85, {"ar": 54.7, "sd": 161.8, "ssd": 255.8}
    ),
    "qwen3-32b": Published("h100x4+1-qwen3-32b", 0.65, {"ar": 88.8, "sd": 136.8, "ssd": 203.8}),
}
EXPONENT = 1.2
BUDGET = 24
CONTEXT = 512
OUTPUT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published speed beside ours, both in tokens/s."""

    pair: str
    method: str
    published: float
    simulated: float
    lookahead: int | None
    label: str = "simulated"

    @property
    def difference(self) -> float:
        """Relative to the published one."""
        return self.simulated / self.published - 1


def paper() -> list[Comparison]:
    """Every published speed beside the simulated one."""
    return [
        _compare(name, method, published)
        for name, pair in PAIRS.items()
        for method, published in pair.tokens_per_s.items()
    ]


def _compare(name: str, method: Method, published: float) -> Comparison:
    best = fastest(scenario(name, method), _ROUNDS)
    lookahead = best.scenario.drafted or None
    return Comparison(name, method, published, best.tokens_per_s, lookahead, best.label)


def scenario(name: str, method: Method) -> Scenario:
    """The paper's setting for a pair and a method."""
    pair = PAIRS[name]
    return Scenario(
        method,
        load_profile(pair.profile),
        Acceptance((pair.acceptance,), EXPONENT),
        budget=BUDGET,
        context=CONTEXT,
        output_tokens=OUTPUT_TOKENS,
    )


def assumptions() -> dict[str, Any]:
    """What the comparison rests on."""
    return {
        "acceptance": {name: pair.acceptance for name, pair in PAIRS.items()},
        "exponent": EXPONENT,
        "budget": BUDGET,
        "fallback": "neural",
        "lookahead": f"the fastest of {LOOKAHEADS[0]} to {LOOKAHEADS[-1]} for each method",
        "dtype": "bfloat16",
        "efficiency": asdict(Efficiency()),
        "context": CONTEXT,
        "output_tokens": OUTPUT_TOKENS,
        "profiles": {name: pair.profile for name, pair in PAIRS.items()},
        "drafting": "synchronous methods draft on one of the target's devices",
    }
