"""The probability of everything that rounds of AMUSD and PEARL emit, by running the real code.

The draft goes on by itself, so a round starts with tokens in hand that were drafted before the last
verification: they are part of the state, and what becomes of them is the real `Chain`'s to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from harness.equivalence.enumeration import (
    Judgement,
    Proposed,
    State,
    Verify,
    extensions,
)
from harness.equivalence.exact_cases import Case, ChainRound, Tokens
from impl.engine import sampling
from impl.engine.chain import Chain
from impl.engine.sampling import Draft, Verification


class _ChainState(NamedTuple):
    """Where a round starts: the text so far, and what is drafted behind it already."""

    text: Tokens
    in_hand: Tokens


def enumerate_chains(case: Case, verify: Verify | None = None) -> dict[Tokens, float]:
    """The probability of every sequence that the rounds of a case emit.

    Args:
        case: one with `chain` rounds.
        verify: the verification; the engine's by default.
    """
    states = {_ChainState((), ()): 1.0}
    for round_ in case.chain:
        following: dict[_ChainState, float] = defaultdict(float)
        for state, weight in states.items():
            for after, share in _round(case, round_, state, verify or sampling.verify):
                following[after] += weight * share
        states = following
    emissions: dict[Tokens, float] = defaultdict(float)
    for state, weight in states.items():
        emissions[state.text] += weight
    return dict(emissions)


def _round(
    case: Case, round_: ChainRound, state: _ChainState, verify: Verify
) -> Iterator[tuple[_ChainState, float]]:
    """What can follow a state, with its probability."""
    ready = max(len(state.in_hand), round_.waits_for)
    fed = min(ready, round_.most)
    for path, weight in _paths(case, state, ready + round_.beside):
        draft = _draft(case, path[: fed + 1])
        unfed = len(draft.tokens) > fed
        start = State(state.text, case.drafter)
        for outcome, share in Judgement(case, start, draft, verify, unfed=unfed).outcomes():
            yield _follow(state, path, draft, outcome), weight * share


def _paths(case: Case, state: _ChainState, count: int) -> Iterator[tuple[list[Proposed], float]]:
    """Every chain of `count` tokens that goes on from those in hand, with its probability."""
    start = State(state.text, case.drafter)
    paths: list[tuple[list[Proposed], float]] = [([], 1.0)]
    for index in range(count):
        known = state.in_hand[index : index + 1]
        paths = [
            (longer, weight if known else weight * longer[-1].weight)
            for path, weight in paths
            for longer in extensions(case, start, path, index)
            if not known or longer[-1].token == known[0]
        ]
    yield from paths


def _draft(case: Case, path: list[Proposed]) -> Draft:
    rows = [drawn.row for drawn in path if drawn.row is not None]
    tokens = torch.tensor([drawn.token for drawn in path], dtype=torch.int64)
    return Draft(tokens, torch.stack(rows) if rows else None, case.drafter.head_ids())


def _follow(
    state: _ChainState, path: list[Proposed], draft: Draft, outcome: Verification
) -> _ChainState:
    """The text behind a verification; the rest of the chain if it goes on, else a new one."""
    judged: list[int] = draft.tokens.tolist()
    text = (*state.text, *(judged[node] for node in outcome.nodes), outcome.token)
    chain = Chain(
        number=0,
        most=len(path),
        ends=frozenset(),
        allowed=len(path),
        text_length=len(state.text),
        tokens=[drawn.token for drawn in path],
    )
    goes_on = chain.follow(len(judged), outcome)
    return _ChainState(text, tuple(chain.tokens[chain.verified :]) if goes_on else ())
