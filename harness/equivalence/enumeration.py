"""The probability of everything that speculative rounds emit, by running the real code.

All that decides is the engine's and the methods' own: the draw of a drafted token and the q that
goes with it, the guesses that make a hit or a miss, and the verification. The random numbers are
integrated out: the code is run at both ends of every interval between the points at which an exact
decision changes, bisecting where the two ends disagree; an interval's length is its probability.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, product
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.decoder import SamplingParams
from harness.equivalence.exact_cases import Case, Row, SmallDrafter, Tokens
from impl.engine import drafter as engine_drafter
from impl.engine import sampling, tree_drafter
from impl.engine.candidate_tree import CandidateTree, Siblings, TreePlan
from impl.engine.sampling import Draft, TreeDraft, Verification
from impl.engine.token_tree import ROOT
from impl.ssd.speculation_cache import Outcome, guesses

Uniforms = Mapping[int, float]  # of the drafted tokens judged so far

_NEAR = 1e-12  # how far inside an interval its ends are tried
_NARROW = 1e-11  # bisection stops here
_NONE: Uniforms = MappingProxyType({})
_UNUSED = 0.5  # stands for a uniform that an exact verification does not look at


class Verify(Protocol):
    """`impl.engine.sampling.verify`, or a broken one."""

    def __call__(
        self, logits: Tensor, draft: Draft, params: SamplingParams, uniforms: Sequence[float]
    ) -> Verification: ...


class _State(NamedTuple):
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
    states = {_State((), case.drafter): 1.0}
    for _ in range(case.rounds):
        following: dict[_State, float] = defaultdict(float)
        for state, weight in states.items():
            for after, share in _round(case, state, verify):
                following[after] += weight * share
        states = following
    emissions: dict[Tokens, float] = defaultdict(float)
    for state, weight in states.items():
        emissions[state.text] += weight
    return dict(emissions)


def _round(case: Case, state: _State, verify: Verify) -> Iterator[tuple[_State, float]]:
    """What can follow a state, with its probability."""
    for draft, weight in _drafts(case, state):
        for outcome, share in _Judgement(case, state, draft, verify).outcomes():
            yield _follow(case, state, draft, outcome), weight * share


def _follow(case: Case, state: _State, draft: Draft, outcome: Verification) -> _State:
    """Where the next round starts: after a hit with the drafter, after a miss with the backup."""
    tokens: list[int] = draft.tokens.tolist()
    text = (*state.text, *(tokens[node] for node in outcome.nodes), outcome.token)
    if case.backup is None:
        return _State(text, case.drafter)
    rows = torch.tensor(np.array([state.drafter.model.logits(t) for t in _texts(state, tokens)]))
    guessed = guesses(rows, tokens, case.fan_out, ids=_ids(state.drafter))
    hit = Outcome(outcome.accepted, outcome.token) in guessed
    return _State(text, case.drafter if hit else case.backup)


def _texts(state: _State, drafted: Sequence[int]) -> list[Tokens]:
    """The texts behind 0, 1, ..., K drafted tokens."""
    return [(*state.text, *drafted[:i]) for i in range(len(drafted) + 1)]


def _ids(drafter: SmallDrafter) -> Tensor | None:
    return None if drafter.ids is None else torch.tensor(drafter.ids)


# Drafts: every token that can be drawn, at every position.


class _Proposed(NamedTuple):
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


def _drafts(case: Case, state: _State) -> Iterator[tuple[Draft, float]]:
    """Every draft that can occur, with its probability."""
    if case.tree is not None:
        yield from _TreeDrafts(case, state).drafts()
        return
    paths: list[list[_Proposed]] = [[]]
    for i in range(case.lookahead):
        paths = [longer for path in paths for longer in _extensions(case, state, path, i)]
    for path in paths:
        rows = [drawn.row for drawn in path if drawn.row is not None]
        tokens = torch.tensor([drawn.token for drawn in path], dtype=torch.int64)
        draft = Draft(tokens, torch.stack(rows) if rows else None, _ids(state.drafter))
        yield draft, float(np.prod([drawn.weight for drawn in path]))


def _extensions(
    case: Case, state: _State, path: list[_Proposed], index: int
) -> list[list[_Proposed]]:
    """The path with each token that can be drafted at `index`; itself where it has stopped."""
    if path and path[-1].last:
        return [path]
    return [[*path, drawn] for drawn in _draws(case, state, path, index)]


def _draws(case: Case, state: _State, path: Sequence[_Proposed], index: int) -> list[_Proposed]:
    """What can be drafted at `index`, behind the tokens of `path`."""
    drafter, ids = state.drafter, _ids(state.drafter)
    text = (*state.text, *(drawn.token for drawn in path))
    logits = torch.tensor(drafter.model.logits(text))[None]
    if drafter.drawn is not None and index >= drafter.drawn:
        column = int(logits.argmax())
        return [_Proposed(column if ids is None else int(ids[column]), None, 1.0)]
    draw = drafter.draw or engine_drafter.draw
    q = draw(logits, case.params, [_UNUSED], ids).q
    row = None if q is None else q[0]
    edges = [] if row is None else _cumulative(row.numpy())
    pieces = _pieces(lambda u: draw(logits, case.params, [u], ids).tokens[0], edges)
    found = []
    for token, middle, length in pieces:
        sure = draw(logits, case.params, [middle], ids).confidences[0]
        last = engine_drafter.stops(sure, drafter.stop_below)
        found.append(_Proposed(token, row, length, last))
    return found


# Tree drafts: every ordered choice of children, at every node that is fed.


class _Drawn(NamedTuple):
    """Children that can be drawn behind a node, their q [Vd] (None: point masses), probability."""

    siblings: Siblings
    q: Tensor | None
    weight: float


class _TreeDrafts:
    """All trees that can grow."""

    def __init__(self, case: Case, state: _State) -> None:
        self._case, self._state = case, state
        self._ids = _ids(state.drafter)
        self._known: dict[tuple[Tokens, int], list[_Drawn]] = {}

    def drafts(self) -> Iterator[tuple[Draft, float]]:
        """Each finished tree once, with its probability."""
        found: dict[tuple[Tokens, Tokens], tuple[Draft, float]] = {}
        for draft, weight in self._grow(CandidateTree(*self._plan()), (), 1.0):
            key = tuple(draft.tokens.tolist()), draft.parents
            found[key] = draft, weight + found.get(key, (draft, 0.0))[1]
        yield from found.values()

    def _plan(self) -> tuple[TreePlan, int]:
        plan = self._case.tree
        if plan is None:
            raise ValueError(f"case {self._case.name}: has no tree")
        return plan, len(plan.children)

    def _grow(
        self, tree: CandidateTree, rows: tuple[Tensor, ...], weight: float
    ) -> Iterator[tuple[TreeDraft, float]]:
        if not tree.frontier:
            kept = tree.finish()
            tokens = torch.tensor(kept.tokens, dtype=torch.int64)
            probs = torch.stack(rows) if rows else None
            yield TreeDraft(tokens, probs, self._ids, kept.parents, kept.sources), weight
            return
        choices = [self._children(self._text(tree, node), tree.wanted) for node in tree.frontier]
        for drawn in product(*choices):
            grown = copy.deepcopy(tree)
            grown.extend([each.siblings for each in drawn])
            fresh = [each.q for each in drawn if each.q is not None]
            share = float(np.prod([each.weight for each in drawn]))
            yield from self._grow(grown, (*rows, *fresh), weight * share)

    def _text(self, tree: CandidateTree, node: int) -> Tokens:
        if node == ROOT:
            return self._state.text
        return (*self._text(tree, tree.parents[node]), tree.tokens[node])

    def _children(self, text: Tokens, count: int) -> list[_Drawn]:
        if (text, count) not in self._known:
            self._known[text, count] = list(self._draws(text, count, (), 1.0))
        return self._known[text, count]

    def _draws(
        self, text: Tokens, count: int, uniforms: tuple[float, ...], weight: float
    ) -> Iterator[_Drawn]:
        """Walks down the siblings, behind those that `uniforms` have drawn."""
        fixed = self._case.params.temperature == 0 or self._state.drafter.drawn == 0
        drawn = self._draw(text, count, None if fixed else uniforms)
        (siblings,), q = drawn.siblings, drawn.q
        if q is None or len(uniforms) == len(siblings.tokens):
            yield _Drawn(siblings, None if q is None else q[0], weight)
            return
        left = self._without(q[0], siblings.tokens[: len(uniforms)])
        pieces = _pieces(
            lambda u: self._draw(text, count, (*uniforms, u)).siblings[0].tokens[len(uniforms)],
            _cumulative(left),
        )
        for _, middle, length in pieces:
            yield from self._draws(text, count, (*uniforms, middle), weight * length)

    def _draw(
        self, text: Tokens, count: int, uniforms: Sequence[float] | None
    ) -> tree_drafter.DrawnChildren:
        logits = torch.tensor(self._state.drafter.model.logits(text))[None]
        count = min(count, logits.shape[-1])
        row = None
        if uniforms is not None:
            row = np.array([[*uniforms, *(_UNUSED,) * (count - len(uniforms))]])
        return tree_drafter.draw_children(logits, self._case.params, count, row, self._ids)

    def _without(self, q: Tensor, tokens: Sequence[int]) -> Row:
        """A q row with these tokens' columns zeroed."""
        left: Row = q.numpy().copy()
        ids = np.arange(len(left)) if self._ids is None else self._ids.numpy()
        left[np.isin(ids, tokens)] = 0
        return left


# Verification: every accepted path, every token emitted behind it.


class _Judged(NamedTuple):
    """An outcome of a verification, and its probability."""

    outcome: Verification
    weight: float


class _Left(NamedTuple):
    """p, and the q of the next candidate, after some rejections at one position."""

    p: Row
    q: Row


class _Judgement:
    """All outcomes of verifying one draft. Its p and q say only where decisions may change."""

    def __init__(self, case: Case, state: _State, draft: Draft, verify: Verify) -> None:
        self._params, self._draft, self._verify = case.params, draft, verify
        self._tokens: list[int] = draft.tokens.tolist()
        texts: dict[int, Tokens] = {ROOT: state.text}
        self._paths: dict[int, Tokens] = {ROOT: ()}
        for node in (ROOT, *range(len(self._tokens))):
            for child in draft.children(node):
                texts[child] = (*texts[node], self._tokens[child])
                self._paths[child] = (*self._paths[node], child)
        rows = [case.target.logits(texts[node]) for node in sorted(texts)]
        self._logits = torch.tensor(np.array(rows))
        self._p = sampling.probabilities(self._logits, case.params).numpy()

    def outcomes(
        self, node: int = ROOT, rejected: int = 0, uniforms: Uniforms = _NONE, weight: float = 1.0
    ) -> Iterator[_Judged]:
        """Walks down the draft, behind `node`, some of whose children have been rejected."""
        children = self._draft.children(node)
        if rejected == len(children):
            yield from self._emissions(node, uniforms, weight)
            return
        child = children[rejected]
        for accepted, middle, length in self._acceptances(node, rejected, uniforms):
            following = (child, 0) if accepted else (node, rejected + 1)
            yield from self.outcomes(*following, {**uniforms, child: middle}, weight * length)

    def _acceptances(self, node: int, rejected: int, uniforms: Uniforms) -> list[_Piece]:
        """Whether a child is accepted, by its uniform."""
        child = self._draft.children(node)[rejected]
        token, (p, q) = self._tokens[child], self._left(node, rejected)
        edges = [p[token] / q[token]] if token < len(p) and q[token] > 0 else []
        return _pieces(lambda u: child in self._run({**uniforms, child: u}, _UNUSED).nodes, edges)

    def _emissions(self, node: int, uniforms: Uniforms, weight: float) -> Iterator[_Judged]:
        """What is emitted behind a node whose children were all rejected, by the last uniform."""
        left = self._left(node, len(self._draft.children(node))).p
        path = self._paths[node]
        pieces = _pieces(lambda u: self._run(uniforms, u).token, _cumulative(left))
        for token, _, length in pieces:
            yield _Judged(Verification(len(path), token, path), weight * length)

    def _run(self, uniforms: Uniforms, emission: float) -> Verification:
        every = [uniforms.get(child, _UNUSED) for child in range(len(self._tokens))]
        return self._verify(self._logits, self._draft, self._params, (*every, emission))

    def _left(self, node: int, rejected: int) -> _Left:
        """Behind a node, by definition."""
        p, children = self._p[node + 1], self._draft.children(node)
        gone: list[int] = []
        for child in children[:rejected]:
            p = _normalised(np.maximum(p - self._q(child, gone)[: len(p)], 0))
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
        return _normalised(q)


# Integrating a uniform out.


class _Piece(NamedTuple):
    """An interval of a uniform on which a decision, a token or an acceptance, is the same."""

    decision: int
    middle: float
    length: float


def _normalised(weights: Row) -> Row:
    total = weights.sum()
    return weights / total if total > 0 else weights


def _cumulative(weights: Row) -> list[float]:
    """Where an inverse-CDF draw changes from one token to the next."""
    total = weights.sum()
    return list(np.cumsum(weights) / total) if total > 0 else []


def _pieces(decide: Callable[[float], int], edges: Sequence[float]) -> list[_Piece]:
    """Splits [0, 1] where a decision changes; an exact one changes at `edges` only."""
    points = np.unique([0.0, 1.0, *(edge for edge in edges if 0 < edge < 1)])
    found: list[_Piece] = []
    for low, high in pairwise(points.tolist()):
        near = min(_NEAR, (high - low) / 4)
        ends = decide(low + near if low else 0.0), decide(high - near)
        found += _bisect(decide, low, high, *ends)
    return [_merge(list(same)) for _, same in groupby(found, key=lambda piece: piece.decision)]


def _merge(pieces: Sequence[_Piece]) -> _Piece:
    """One piece for neighbours that agree."""
    low = pieces[0].middle - pieces[0].length / 2
    length = sum(piece.length for piece in pieces)
    return _Piece(pieces[0].decision, low + length / 2, length)


def _bisect(
    decide: Callable[[float], int], low: float, high: float, first: int, last: int
) -> list[_Piece]:
    """Pieces of an interval, given the decisions at its ends; where they agree there is one."""
    middle = (low + high) / 2
    if first == last or high - low < _NARROW:
        return [_Piece(first, middle, high - low)]
    between = decide(middle)
    return [
        *_bisect(decide, low, middle, first, between),
        *_bisect(decide, middle, high, between, last),
    ]
