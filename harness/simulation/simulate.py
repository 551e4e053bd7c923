"""Runs schedules round by round, many scenarios at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.simulation.acceptance import (
    Acceptance,
    Outcomes,
    SampledOutcomes,
    Trace,
    TracedOutcomes,
)
from harness.simulation.configurations import Configurations
from harness.simulation.scenario import Scenario, Simulated
from harness.simulation.schedules import SCHEDULES, Schedule, Turn

LOOKAHEADS = tuple(range(1, 17))


def simulate(scenarios: Sequence[Scenario], rounds: int = 10_000, seed: int = 0) -> list[Simulated]:
    """Simulates every scenario for so many rounds.

    Scenarios of one method advance together, and a result does not depend on those beside it.

    Args:
        scenarios: any mixture of methods.
        rounds: steps of each; a step advances all sequences of a batch.
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
    """Sums over rounds, one row for each scenario."""

    size: int
    tokens: np.ndarray = field(init=False)
    seconds: np.ndarray = field(init=False)
    stalls: np.ndarray = field(init=False)
    hits: np.ndarray = field(init=False)
    judged: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds", "stalls", "hits", "judged"):
            setattr(self, name, np.zeros(self.size))

    def add(self, turn: Turn, emitted: np.ndarray, live: np.ndarray) -> None:
        """Adds a round; `emitted` is cut at the ends of sequences and 0 in empty slots."""
        self.tokens += emitted.sum(axis=1)
        self.seconds += turn.seconds
        self.stalls += turn.stalled
        if turn.hits is not None and turn.judged is not None:
            self.hits += (turn.hits & turn.judged & live).sum(axis=1)
            self.judged += (turn.judged & live).sum(axis=1)


def _run(schedule: Schedule, rounds: int, seed: int) -> list[Simulated]:
    c = schedule.configurations
    outcomes = _outcomes(c, rounds, seed)
    totals, most = _Totals(len(c)), c.output_tokens[:, None]
    left = np.broadcast_to(most, c.live.shape).copy()
    for number in range(rounds):
        turn = schedule.turn(number, outcomes)
        emitted = np.minimum(turn.emitted, left) * c.live
        totals.add(turn, emitted, c.live)
        left -= emitted
        finished = (left == 0) & c.live
        if finished.any():
            left = np.where(finished, most, left)
            schedule.restart(finished)
    return [_result(scenario, totals, row, rounds) for row, scenario in enumerate(c.scenarios)]


def _outcomes(c: Configurations, rounds: int, seed: int) -> Outcomes:
    acceptances = [scenario.acceptance for scenario in c.scenarios]
    sampled = [each for each in acceptances if isinstance(each, Acceptance)]
    if isinstance(acceptances[0], Trace):
        return TracedOutcomes(acceptances[0], len(c), c.slots, rounds, seed)
    return SampledOutcomes(sampled, c.longest, c.slots, rounds, seed)


def _result(scenario: Scenario, totals: _Totals, row: int, rounds: int) -> Simulated:
    judged = totals.judged[row]
    return Simulated(
        scenario,
        tokens_per_s=float(totals.tokens[row] / totals.seconds[row]),
        acceptance_length=float(totals.tokens[row] / (rounds * scenario.batch_size)),
        hit_rate=float(totals.hits[row] / judged) if judged else None,
        stall_rate=float(totals.stalls[row] / rounds),
        round_ms=float(1e3 * totals.seconds[row] / rounds),
    )
