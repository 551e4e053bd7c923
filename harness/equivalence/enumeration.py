"""The probability of everything that speculative rounds emit, by running the real code.

All that decides is the engine's and the methods' own: the draw of a drafted token and the q that
goes with it, the guesses that make a hit or a miss, and the verification. The random numbers are
integrated out: the code is run at both ends of every interval between the points at which an exact
decision changes, bisecting where the two ends disagree; an interval's length is its probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.decoder import SamplingParams
from harness.equivalence.exact_cases import Case, Row, SmallDrafter, Tokens
from impl.engine import drafter as engine_drafter
from impl.engine import sampling
from impl.engine.sampling import Draft, Verification
from impl.ssd.speculation_cache import Outcome, guesses

Uniforms = tuple[float, ...]

_NEAR = 1e-12  # how far inside an interval its ends are tried
_NARROW = 1e-11  # bisection stops here
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
    text = (*state.text, *tokens[: outcome.accepted], outcome.token)
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


# Verification: every number of accepted tokens, every token emitted behind them.


class _Judged(NamedTuple):
    """An outcome of a verification, and its probability."""

    outcome: Verification
    weight: float


class _Judgement:
    """All outcomes of verifying one draft. Its p and q say only where decisions may change."""

    def __init__(self, case: Case, state: _State, draft: Draft, verify: Verify) -> None:
        self._params, self._draft, self._verify = case.params, draft, verify
        self._tokens: list[int] = draft.tokens.tolist()
        texts = _texts(state, self._tokens)
        self._logits = torch.tensor(np.array([case.target.logits(text) for text in texts]))
        self._p = sampling.probabilities(self._logits, case.params).numpy()

    def outcomes(self, uniforms: Uniforms = (), weight: float = 1.0) -> Iterator[_Judged]:
        """Walks down the draft, behind the tokens that `uniforms` have accepted."""
        i = len(uniforms)
        if i == len(self._tokens):
            yield from self._emissions(i, uniforms, weight)
            return
        for accepted, middle, length in self._acceptances(i, uniforms):
            if accepted:
                yield from self.outcomes((*uniforms, middle), weight * length)
            else:
                yield from self._emissions(i, (*uniforms, middle), weight * length)

    def _acceptances(self, i: int, uniforms: Uniforms) -> list[_Piece]:
        """Whether token i is accepted, by its uniform."""
        p, q, token = self._p[i], self._q(i), self._tokens[i]
        edges = [p[token] / q[token]] if token < len(p) else []
        return _pieces(lambda u: self._run((*uniforms, u), _UNUSED).accepted > i, edges)

    def _emissions(self, i: int, uniforms: Uniforms, weight: float) -> Iterator[_Judged]:
        """What is emitted behind i accepted tokens, by the last uniform."""
        p = self._p[i]
        left = np.maximum(p - self._q(i)[: len(p)], 0) if i < len(self._tokens) else p
        pieces = _pieces(lambda u: self._run(uniforms, u).token, _cumulative(left))
        for token, _, length in pieces:
            yield _Judged(Verification(i, token), weight * length)

    def _run(self, uniforms: Uniforms, emission: float) -> Verification:
        unused = (_UNUSED,) * (len(self._tokens) - len(uniforms))
        return self._verify(self._logits, self._draft, self._params, (*uniforms, *unused, emission))

    def _q(self, i: int) -> Row:
        """The q of token i by target id, at least as long as p."""
        row, ids = self._draft.row(i), self._draft.ids
        if row is None:
            row, ids = torch.ones(1), self._draft.tokens[i : i + 1]
        if ids is None:
            ids = torch.arange(len(row))
        q = np.zeros(max(self._p.shape[1], int(ids.max()) + 1))
        q[ids.numpy()] = row.numpy()
        return q


# Integrating a uniform out.


class _Piece(NamedTuple):
    """An interval of a uniform on which a decision, a token or an acceptance, is the same."""

    decision: int
    middle: float
    length: float


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
