"""The probability of everything that speculative rounds emit, by running the real code.

All that decides is the engine's and the methods' own: the draw of a drafted token and the q that
goes with it, how a tree grows and what is cut of it, the guesses that make a hit or a miss, and the
verification. The random numbers are integrated out (`harness.equivalence.pieces`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.decoder import SamplingParams
from harness.equivalence.exact_cases import Case, Row, SmallDrafter, Tokens
from harness.equivalence.pieces import UNUSED, Piece, cumulative, normalised, pieces
from harness.equivalence.tree_drafts import TreeDrafts
from impl.engine import drafter as engine_drafter
from impl.engine import sampling
from impl.engine.sampling import Draft, Verification
from impl.engine.token_tree import ROOT
from impl.ssd.speculation_cache import Outcome, guesses

Uniforms = Mapping[int, float]  # of the drafted tokens judged so far
_NONE: Uniforms = MappingProxyType({})


class Verify(Protocol):
    """`impl.engine.sampling.verify`, or a broken one."""

    def __call__(
        self, logits: Tensor, draft: Draft, params: SamplingParams, uniforms: Sequence[float]
    ) -> Verification: ...


class State(NamedTuple):
    """Where a round starts: the text so far, and who drafts what follows."""

    text: Tokens
    drafter: SmallDrafter


def enumerate_emissions(case: Case, verify: Verify | None = None) -> dict[Tokens, float]:
    """The probability of every sequence that the rounds of a case emit.

    Args:
        case: models, parameters and rounds.
        verify: the verification; the engine's by default.

    Returns:
        Emitted tokens -> probability. How many are emitted depends on how many are accepted.
    """
    verify = verify or sampling.verify
    states = {State((), case.drafter): 1.0}
    for _ in range(case.rounds):
        following: dict[State, float] = defaultdict(float)
        for state, weight in states.items():
            for after, share in _round(case, state, verify):
                following[after] += weight * share
        states = following
    emissions: dict[Tokens, float] = defaultdict(float)
    for state, weight in states.items():
        emissions[state.text] += weight
    return dict(emissions)


def _round(case: Case, state: State, verify: Verify) -> Iterator[tuple[State, float]]:
    """What can follow a state, with its probability."""
    for draft, weight in _drafts(case, state):
        for outcome, share in Judgement(case, state, draft, verify).outcomes():
            yield _follow(case, state, draft, outcome), weight * share


def _follow(case: Case, state: State, draft: Draft, outcome: Verification) -> State:
    """Where the next round starts: after a hit with the drafter, after a miss with the backup."""
    tokens: list[int] = draft.tokens.tolist()
    text = (*state.text, *(tokens[node] for node in outcome.nodes), outcome.token)
    if case.backup is None:
        return State(text, case.drafter)
    rows = torch.tensor(np.array([state.drafter.model.logits(t) for t in _texts(state, tokens)]))
    guessed = guesses(rows, tokens, case.fan_out, ids=state.drafter.head_ids())
    hit = Outcome(outcome.accepted, outcome.token) in guessed
    return State(text, case.drafter if hit else case.backup)


def _texts(state: State, drafted: Sequence[int]) -> list[Tokens]:
    """The texts behind 0, 1, ..., K drafted tokens."""
    return [(*state.text, *drafted[:i]) for i in range(len(drafted) + 1)]


# Drafts: every token that can be drawn, at every position.


class Proposed(NamedTuple):
    """A token that can be drafted next.

    Attributes:
        token: its target id.
        row: the q that it is drawn from; None for a point mass.
        weight: the probability that it is drawn.
        last: whether the draft stops behind it, however many tokens are wanted.
    """

    token: int
    row: Tensor | None
    weight: float
    last: bool = False


def _drafts(case: Case, state: State) -> Iterator[tuple[Draft, float]]:
    """Every draft that can occur, with its probability."""
    if case.tree is not None:
        yield from TreeDrafts(case.tree, case.params, state.drafter, state.text).drafts()
        return
    paths: list[list[Proposed]] = [[]]
    for i in range(case.lookahead):
        paths = [longer for path in paths for longer in extensions(case, state, path, i)]
    for path in paths:
        rows = [drawn.row for drawn in path if drawn.row is not None]
        tokens = torch.tensor([drawn.token for drawn in path], dtype=torch.int64)
        draft = Draft(tokens, torch.stack(rows) if rows else None, state.drafter.head_ids())
        yield draft, float(np.prod([drawn.weight for drawn in path]))


def extensions(case: Case, state: State, path: list[Proposed], index: int) -> list[list[Proposed]]:
    """The path with each token that can be drafted at `index`; itself where it has stopped."""
    if path and path[-1].last:
        return [path]
    return [[*path, drawn] for drawn in _draws(case, state, path, index)]


def _draws(case: Case, state: State, path: Sequence[Proposed], index: int) -> list[Proposed]:
    """What can be drafted at `index`, behind the tokens of `path`."""
    drafter, ids = state.drafter, state.drafter.head_ids()
    text = (*state.text, *(drawn.token for drawn in path))
    logits = torch.tensor(drafter.model.logits(text))[None]
    if drafter.drawn is not None and index >= drafter.drawn:
        column = int(logits.argmax())
        return [Proposed(column if ids is None else int(ids[column]), None, 1.0)]
    draw = drafter.draw or engine_drafter.draw
    q = draw(logits, case.params, [UNUSED], ids).q
    row = None if q is None else q[0]
    edges = [] if row is None else cumulative(row.numpy())
    found = []
    drawn = pieces(lambda u: draw(logits, case.params, [u], ids).tokens[0], edges)
    for token, middle, length in drawn:
        sure = draw(logits, case.params, [middle], ids).confidences[0]
        last = engine_drafter.stops(sure, drafter.stop_below)
        found.append(Proposed(token, row, length, last))
    return found


# Verification: every accepted path, every token emitted behind it.


class _Judged(NamedTuple):
    """An outcome of a verification, and its probability."""

    outcome: Verification
    weight: float


class _Left(NamedTuple):
    """p, and the q of the next candidate, after some rejections at one position."""

    p: Row
    q: Row


class Judgement:
    """All outcomes of verifying one draft. Its p and q say only where decisions may change."""

    def __init__(
        self, case: Case, state: State, draft: Draft, verify: Verify, *, unfed: bool = False
    ) -> None:
        """Prepares the target's logits.

        Args:
            case: models and parameters.
            state: where the draft starts.
            draft: what is judged.
            verify: how.
            unfed: the target was not fed the chain's last token, which was drafted meanwhile.
        """
        self._params, self._draft, self._verify = case.params, draft, verify
        self._tokens: list[int] = draft.tokens.tolist()
        texts: dict[int, Tokens] = {ROOT: state.text}
        self._paths: dict[int, Tokens] = {ROOT: ()}
        for node in (ROOT, *range(len(self._tokens))):
            for child in draft.children(node):
                texts[child] = (*texts[node], self._tokens[child])
                self._paths[child] = (*self._paths[node], child)
        rows = [case.target.logits(texts[node]) for node in sorted(texts)]
        self._logits = torch.tensor(np.array(rows[: len(rows) - unfed]))
        self._p = sampling.probabilities(self._logits, case.params).numpy()

    def outcomes(
        self, node: int = ROOT, rejected: int = 0, uniforms: Uniforms = _NONE, weight: float = 1.0
    ) -> Iterator[_Judged]:
        """Walks down the draft, behind `node`, some of whose children have been rejected."""
        if node + 1 == len(self._logits):  # the unfed token was accepted: nothing is drawn
            yield _Judged(self._run(uniforms, UNUSED), weight)
            return
        children = self._draft.children(node)
        if rejected == len(children):
            yield from self._emissions(node, uniforms, weight)
            return
        child = children[rejected]
        for accepted, middle, length in self._acceptances(node, rejected, uniforms):
            following = (child, 0) if accepted else (node, rejected + 1)
            yield from self.outcomes(*following, {**uniforms, child: middle}, weight * length)

    def _acceptances(self, node: int, rejected: int, uniforms: Uniforms) -> list[Piece]:
        """Whether a child is accepted, by its uniform."""
        child = self._draft.children(node)[rejected]
        token, (p, q) = self._tokens[child], self._left(node, rejected)
        edges = [p[token] / q[token]] if token < len(p) and q[token] > 0 else []

        def accepted(uniform: float) -> bool:
            outcome = self._run({**uniforms, child: uniform}, UNUSED)
            return child in outcome.nodes or (outcome.token_drafted and child == outcome.accepted)

        return pieces(accepted, edges)

    def _emissions(self, node: int, uniforms: Uniforms, weight: float) -> Iterator[_Judged]:
        """What is emitted behind a node whose children were all rejected, by the last uniform."""
        left = self._left(node, len(self._draft.children(node))).p
        path = self._paths[node]
        for token, _, length in pieces(lambda u: self._run(uniforms, u).token, cumulative(left)):
            yield _Judged(Verification(len(path), token, path), weight * length)

    def _run(self, uniforms: Uniforms, emission: float) -> Verification:
        every = [uniforms.get(child, UNUSED) for child in range(len(self._tokens))]
        return self._verify(self._logits, self._draft, self._params, (*every, emission))

    def _left(self, node: int, rejected: int) -> _Left:
        """Behind a node, by definition."""
        p, children = self._p[node + 1], self._draft.children(node)
        gone: list[int] = []
        for child in children[:rejected]:
            p = normalised(np.maximum(p - self._q(child, gone)[: len(p)], 0))
            gone.append(self._tokens[child])
        return _Left(p, self._q(children[rejected], gone) if rejected < len(children) else p)

    def _q(self, child: int, gone: Sequence[int]) -> Row:
        """The q of a token by target id, at least as long as p, its elder siblings `gone`."""
        row, ids = self._draft.row(child), self._draft.ids
        if row is None:
            row, ids = torch.ones(1), self._draft.tokens[child : child + 1]
        if ids is None:
            ids = torch.arange(len(row))
        q = np.zeros(max(self._p.shape[1], int(ids.max()) + 1))
        q[ids.numpy()] = row.numpy()
        q[list(gone)] = 0
        return normalised(q)
