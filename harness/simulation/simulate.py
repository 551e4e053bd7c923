"""Runs schedules round by round, many scenarios at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.simulation.acceptance import Acceptance, Outcomes, SampledOutcomes
from harness.simulation.configurations import Configurations
from harness.simulation.scenario import Scenario, Simulated
from harness.simulation.schedules import SCHEDULES, Schedule, Turn
from harness.simulation.traces import RecordedOutcomes, Trace, TracedOutcomes

LOOKAHEADS = tuple(range(1, 17))


def simulate(
    scenarios: Sequence[Scenario], rounds: int | None = 10_000, seed: int = 0
) -> list[Simulated]:
    """Simulates every scenario for so many rounds.

    Scenarios of one method advance together, and a result does not depend on those beside it.

    Args:
        scenarios: any mixture of methods.
        rounds: steps of each; a step advances all sequences of a batch. None, for traces alone:
            each of their requests once.
        seed: of the sampled outcomes.

    Returns:
        One result for each scenario, in their order.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for index, scenario in enumerate(scenarios):
        trace = id(scenario.acceptance) if isinstance(scenario.acceptance, Trace) else 0
        groups.setdefault((scenario.method, trace), []).append(index)
    found: dict[int, Simulated] = {}
    for (method, _), members in groups.items():
        configurations = Configurations([scenarios[index] for index in members])
        results = _run(SCHEDULES[method](configurations), rounds, seed)
        found.update(zip(members, results, strict=True))
    return [found[index] for index in range(len(scenarios))]


def fastest(
    scenario: Scenario, rounds: int = 10_000, seed: int = 0, lookaheads: Sequence[int] = LOOKAHEADS
) -> Simulated:
    """The scenario at the lookahead that is its best, so that no method stands there untuned."""
    return fastest_each([scenario], rounds, seed, lookaheads)[0]


def fastest_each(
    scenarios: Sequence[Scenario],
    rounds: int = 10_000,
    seed: int = 0,
    lookaheads: Sequence[int] = LOOKAHEADS,
) -> list[Simulated]:
    """`fastest` of each, in one sweep."""
    tried = [lookaheads if s.method != "ar" else lookaheads[:1] for s in scenarios]
    pairs = list(zip(scenarios, tried, strict=True))
    results = iter(simulate([replace(s, lookahead=k) for s, ks in pairs for k in ks], rounds, seed))
    each = [[next(results) for _ in ks] for ks in tried]
    return [max(found, key=lambda one: one.tokens_per_s) for found in each]


@dataclass
class _Totals:
    """Sums over rounds, one row for each scenario.

    Attributes:
        rounds: in which anything was live.
        sequences: live in them, added up.
    """

    size: int
    rounds: np.ndarray = field(init=False)
    sequences: np.ndarray = field(init=False)
    tokens: np.ndarray = field(init=False)
    seconds: np.ndarray = field(init=False)
    stalls: np.ndarray = field(init=False)
    hits: np.ndarray = field(init=False)
    judged: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in ("rounds", "sequences", "tokens", "seconds", "stalls", "hits", "judged"):
            setattr(self, name, np.zeros(self.size))

    def add(self, turn: Turn, emitted: np.ndarray, live: np.ndarray) -> None:
        """Adds a round; `emitted` is cut at the ends of sequences and 0 in empty slots."""
        sequences = live.sum(axis=1)
        active = sequences > 0
        self.rounds += active
        self.sequences += sequences
        self.tokens += emitted.sum(axis=1)
        self.seconds += turn.seconds * active
        self.stalls += turn.stalled & active
        if turn.hits is not None and turn.judged is not None:
            self.hits += (turn.hits & turn.judged & live).sum(axis=1)
            self.judged += (turn.judged & live).sum(axis=1)


def _run(schedule: Schedule, rounds: int | None, seed: int) -> list[Simulated]:
    c = schedule.configurations
    outcomes, totals = _outcomes(c, rounds, seed), _Totals(len(c))
    left = outcomes.admit(c.live)
    c.live &= left > 0
    number = 0
    while number != rounds and c.live.any():
        turn = schedule.turn(number, outcomes)
        emitted = np.minimum(turn.emitted, left) * c.live
        totals.add(turn, emitted, c.live)
        outcomes.advance(emitted)
        left -= emitted
        finished = (left == 0) & c.live
        if finished.any():
            left += outcomes.admit(finished)
            schedule.restart(finished)
            c.live &= left > 0
        number += 1
    return [_result(scenario, totals, row) for row, scenario in enumerate(c.scenarios)]


def _outcomes(c: Configurations, rounds: int | None, seed: int) -> Outcomes:
    first = c.scenarios[0].acceptance
    if isinstance(first, Trace):
        replayed = RecordedOutcomes if first.as_recorded else TracedOutcomes
        return replayed(first, len(c), c.slots, rounds, seed)
    if rounds is None:
        raise ValueError("rounds: None needs a trace; sampled sequences have no end")
    sampled = [s.acceptance for s in c.scenarios if isinstance(s.acceptance, Acceptance)]
    return SampledOutcomes(sampled, c.output_tokens, c.longest, c.slots, rounds, seed)


def _result(scenario: Scenario, totals: _Totals, row: int) -> Simulated:
    judged = totals.judged[row]
    return Simulated(
        scenario,
        tokens_per_s=float(totals.tokens[row] / totals.seconds[row]),
        acceptance_length=float(totals.tokens[row] / totals.sequences[row]),
        hit_rate=float(totals.hits[row] / judged) if judged else None,
        stall_rate=float(totals.stalls[row] / totals.rounds[row]),
        round_ms=float(1e3 * totals.seconds[row] / totals.rounds[row]),
    )
