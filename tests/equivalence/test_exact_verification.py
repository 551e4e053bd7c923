"""Verification, enumerated: what `verify` emits is distributed as the target, to 1e-9.

The random numbers are integrated out by running the real code at both ends of every interval
between the points at which an exact acceptance or draw changes its mind, bisecting where the two
ends disagree; the weight of an outcome is the length of its interval. Each emitted sequence is
continued by the target to K+1 tokens, so the comparison covers the joint distribution of an
accepted prefix and what follows it.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from harness.decoder import SamplingParams
from impl.engine.sampling import Draft, Verification, probabilities, residual, sample, verify

PLAIN = SamplingParams(temperature=1.0)


# --- an independent reference ------------------------------------------------------------------


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k and top-p, one token at a time in order of likelihood."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return np.eye(len(logits))[order[0]]
    weight = np.exp((logits - logits.max()) / params.temperature)
    order = order[: params.top_k or None]
    nucleus, mass = [], 0.0
    while not nucleus or (mass < params.top_p and len(nucleus) < len(order)):
        nucleus.append(order[len(nucleus)])
        mass += weight[nucleus[-1]] / weight[order].sum()
    kept = np.zeros(len(logits))
    kept[nucleus] = weight[nucleus]
    return kept / kept.sum()


# --- models whose next-token distribution is a fixed function of the prefix ----------------------


@dataclass(frozen=True)
class Target:
    vocab: int
    seed: int = 0
    masked: frozenset[int] = frozenset()
    fixed: tuple[float, ...] | None = None  # the same distribution at every prefix

    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        if self.fixed is not None:
            return np.log(np.array(self.fixed))
        logits = np.random.default_rng([self.seed, 1, *prefix]).normal(size=self.vocab) * 1.5
        logits[list(self.masked)] = -np.inf
        return logits


@dataclass(frozen=True)
class Drafter:
    """Proposes the target ids `columns`; from position `point_from` on, one of them for sure."""

    columns: tuple[int, ...]
    trimmed: bool = False
    zeros: bool = False
    point_from: int = 99
    seed: int = 0
    fixed: tuple[float, ...] | None = None

    def distribution(self, prefix: tuple[int, ...]) -> np.ndarray:
        size = len(self.columns)
        rng = np.random.default_rng([self.seed, 2, *prefix])
        if self.fixed is not None:
            return np.array(self.fixed)
        if len(prefix) >= self.point_from:
            return np.eye(size)[rng.integers(size)]
        q = rng.dirichlet(np.ones(size))
        if self.zeros:
            q[rng.permutation(size)[: size // 2]] = 0
        return q / q.sum()


def enumerate_drafts(drafter: Drafter, lookahead: int):
    """Every draft that can occur, with its probability."""
    for columns in product(range(len(drafter.columns)), repeat=lookahead):
        tokens = tuple(drafter.columns[column] for column in columns)
        rows = [drafter.distribution(tokens[:i]) for i in range(lookahead)]
        weight = np.prod([row[column] for row, column in zip(rows, columns, strict=True)])
        if weight > 0:
            stored = rows[: drafter.point_from]
            draft = Draft(
                torch.tensor(tokens),
                torch.tensor(np.array(stored)) if stored else None,
                torch.tensor(drafter.columns) if drafter.trimmed else None,
            )
            yield tokens, rows, draft, float(weight)


# --- integrating the uniforms out ----------------------------------------------------------------


def pieces(decide: Callable[[float], object], *points: np.ndarray | float):
    """Splits [0, 1] into intervals on which `decide` is constant: (decision, middle, length)."""
    inside = np.concatenate([np.atleast_1d(p) for p in points])
    edges = np.unique([0.0, 1.0, *inside[(inside > 0) & (inside < 1)]])
    return [piece for low, high in pairwise(edges) for piece in bisect(decide, low, high)]


def bisect(decide, low, high):
    margin = min(1e-12, (high - low) / 4)
    first, last = decide(low + margin), decide(high - margin)
    middle = (low + high) / 2
    if first == last or high - low < 1e-11:
        return [(first, middle, high - low)]
    return bisect(decide, low, middle) + bisect(decide, middle, high)


def cumulative(weights: np.ndarray) -> np.ndarray:
    total = weights.sum()
    return np.cumsum(weights) / total if total > 0 else np.array([])


def on_target(row: np.ndarray, drafter: Drafter, vocab: int) -> np.ndarray:
    full = np.zeros(max(vocab, *(c + 1 for c in drafter.columns)))
    full[list(drafter.columns)] = row
    return full


def emitted_distribution(verifier: Callable, target, drafter, lookahead, params):
    """Probability of each emitted sequence (accepted tokens and t*), by running `verifier`."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, rows, draft, weight in enumerate_drafts(drafter, lookahead):
        raw = np.array([target.logits(tokens[:i]) for i in range(lookahead + 1)])
        ps = [reference_distribution(row, params) for row in raw]

        def run(uniforms, raw=raw, draft=draft) -> Verification:
            padded = [*uniforms[:-1], *[0.5] * (lookahead + 1 - len(uniforms)), uniforms[-1]]
            return verifier(torch.tensor(raw), draft, params, padded)

        def emit(prefix, uniforms, weight, *points, run=run):
            for token, _, length in pieces(lambda u: run([*uniforms, u]).token, *points):
                emitted[(*prefix, token)] += weight * length

        def decide(i, uniforms, *points, run=run):
            return pieces(lambda u: run([*uniforms, u, 0.5]).accepted > i, *points)

        uniforms: list[float] = []
        for i, token in enumerate(tokens):
            q = on_target(rows[i], drafter, target.vocab)
            p = np.pad(ps[i], (0, len(q) - len(ps[i])))
            decisions = decide(i, uniforms, p[token], q[token], p[token] / q[token])
            left = cumulative(np.maximum(p - q, 0))
            for accepted, middle, length in decisions:
                if not accepted:
                    emit(tokens[:i], [*uniforms, middle], weight * length, left, cumulative(p))
            kept = [(middle, length) for accepted, middle, length in decisions if accepted]
            weight *= sum(length for _, length in kept)
            if weight == 0:
                break
            uniforms.append(kept[0][0])
        else:
            emit(tokens, uniforms, weight, cumulative(ps[-1]))
    return emitted


def largest_error(verifier, target, drafter, lookahead, params=PLAIN) -> float:
    """Largest difference of a sequence of K+1 tokens from the target's own probability of it."""
    emitted = emitted_distribution(verifier, target, drafter, lookahead, params)
    errors = []
    for sequence in product(range(target.vocab), repeat=lookahead + 1):
        conditional = [
            reference_distribution(target.logits(sequence[:i]), params)[token]
            for i, token in enumerate(sequence)
        ]
        got = sum(
            emitted.get(sequence[:n], 0.0) * np.prod(conditional[n:])
            for n in range(1, lookahead + 2)
        )
        errors.append(abs(got - np.prod(conditional)))
    # Whatever was emitted beyond the target's vocabulary would be missing from the sum.
    errors.append(abs(sum(emitted.values()) - 1))
    return max(errors)


# --- exactness -----------------------------------------------------------------------------------

DRAFTERS = {
    "dense": (Target(4), Drafter((0, 1, 2, 3))),
    "zeros in q": (Target(4), Drafter((0, 1, 2, 3), zeros=True)),
    "zeros in p": (Target(4, masked=frozenset({1})), Drafter((0, 1, 2, 3))),
    "disjoint supports": (Target(4, masked=frozenset({0, 2})), Drafter((0, 2), trimmed=True)),
    "point mass": (Target(4), Drafter((0, 1, 2, 3), point_from=0)),
    "speculation then filler": (Target(4), Drafter((0, 1, 2, 3), point_from=1)),
    "trimmed": (Target(4), Drafter((3, 1), trimmed=True)),
    "trimmed to one token": (Target(4), Drafter((2,), trimmed=True)),
    "smaller draft vocabulary": (Target(4), Drafter((0, 1, 2))),
    "draft padded beyond the target": (Target(3), Drafter((0, 1, 2, 3))),
    "point mass beyond the target": (Target(3), Drafter((0, 1, 2, 3), point_from=0, seed=4)),
}
PARAMS = [
    SamplingParams(0.0),
    SamplingParams(0.5),
    SamplingParams(2.0),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(0.7, top_k=3, top_p=0.8),
]


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
def test_emitted_sequences_follow_the_target(vocab, lookahead):
    drafter = Drafter(tuple(range(vocab)))
    assert largest_error(verify, Target(vocab), drafter, lookahead) < 1e-9


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_draft_under_every_parameter(name, params):
    target, drafter = DRAFTERS[name]
    assert largest_error(verify, target, drafter, 2, params) < 1e-9


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_no_draft_emits_the_target(top_p):
    params = SamplingParams(1.0, top_p=top_p)
    assert largest_error(verify, Target(5), Drafter((0,)), 0, params) < 1e-9


# --- hand-worked anchors, and mutants that the enumeration must catch ----------------------------

HAND_TARGET = Target(3, fixed=(0.5, 0.3, 0.2))
HAND_DRAFTER = Drafter((0, 1, 2), fixed=(0.2, 0.3, 0.5))


def first_token(verifier) -> list[float]:
    emitted = emitted_distribution(verifier, HAND_TARGET, HAND_DRAFTER, 1, PLAIN)
    marginal = [0.0] * 3
    for sequence, weight in emitted.items():
        marginal[sequence[0]] += weight
    return marginal


def rejecting_by(accept, left=residual, emission=-1):
    """`verify` with another acceptance rule, residual, or uniform for the emitted token."""

    def verifier(logits, draft, params, uniforms):
        p = probabilities(logits, params)
        for i, token in enumerate(draft.tokens.tolist()):
            if not accept(uniforms[i], p[i], draft.probs[i], token):
                uniform = torch.tensor(uniforms[emission if emission < 0 else i])
                return Verification(i, int(sample(left(p[i], draft.row(i), None, token), uniform)))
        return Verification(len(p) - 1, int(sample(p[-1], torch.tensor(uniforms[-1]))))

    return verifier


def exactly(u, p, q, token):
    return u * q[token] < p[token]


def greedily(u, p, q, token):
    return token == int(p.argmax())


def from_target(p, *_):
    return p


def from_distance(p, q, *_):
    return (p - q).abs()


def test_exact_rule_by_hand():
    # Accepted: (.2, .3, .2); rejected mass .3, all of it emitted as token 0.
    assert first_token(verify) == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)


def test_greedy_acceptance_by_hand():
    # Token 0 is accepted when drafted (.2); the other .8 is emitted from p, or from the residual
    # (.3, 0, 0), which is token 0 for sure.
    from_p = first_token(rejecting_by(greedily, from_target))
    assert from_p == pytest.approx([0.2 + 0.8 * 0.5, 0.8 * 0.3, 0.8 * 0.2], abs=1e-9)
    assert first_token(rejecting_by(greedily)) == pytest.approx([1, 0, 0], abs=1e-9)


MUTANTS = {
    "greedy acceptance": rejecting_by(greedily),
    "greedy acceptance, then the target": rejecting_by(greedily, from_target),
    "emits from p after a rejection": rejecting_by(exactly, from_target),
    "emits from |p - q|": rejecting_by(exactly, from_distance),
    "epsilon added to q": rejecting_by(lambda u, p, q, t: u * (q[t] + 1e-2) < p[t]),
    "emission shares the acceptance uniform": rejecting_by(exactly, emission=0),
    "q of the wrong position": lambda logits, draft, params, uniforms: verify(
        logits, Draft(draft.tokens, draft.probs.flip(0)), params, uniforms
    ),
}


SMALL = (Target(3, seed=1), Drafter((0, 1, 2), seed=1))  # a mutant costs many bisections


def test_the_rebuilt_rule_is_exact_before_it_is_mutated():
    assert largest_error(rejecting_by(exactly), *SMALL, 2) < 1e-9


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    assert largest_error(MUTANTS[name], *SMALL, 2) > 1e-3
