"""A Markov chain in place of a model: every distribution is known, a million tokens take no time.

Row s of a table is the distribution behind the last token s. Token 0 ends an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.equivalence.reference_scores import Columns, reduce_rows

VOCAB = 8
_RNG = np.random.default_rng(20240)
TARGET = _RNG.dirichlet(np.full(VOCAB, 0.8), size=VOCAB)
DRAFT = 0.5 * TARGET + 0.5 * _RNG.dirichlet(np.full(VOCAB, 0.8), size=VOCAB)
FAVOURITES = np.argsort(-DRAFT, axis=1)[:, :3]
ARGMAX = TARGET.argmax(1)


def toward(table: np.ndarray, favourite: np.ndarray, share: float) -> np.ndarray:
    """Moves a share of every row's other mass to one token of it."""
    moved = (1 - share) * table
    moved[np.arange(len(table)), favourite] += share
    return moved


def sharpened(table: np.ndarray, temperature: float) -> np.ndarray:
    """The rows at another temperature."""
    powers = table ** (1 / temperature)
    return powers / powers.sum(1, keepdims=True)


def sample_rows(table: np.ndarray, states: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token from each state's row."""
    cumulative = table[states].cumsum(1)
    return (rng.random(len(states))[:, None] >= cumulative[:, :-1]).sum(1)


@dataclass(frozen=True)
class Tokens:
    """Emitted tokens: what came before each, the token, and the output that it belongs to."""

    before: np.ndarray
    token: np.ndarray
    output: np.ndarray

    def scored(self) -> Columns:
        """Under the true target, in the order of the outputs."""
        order = np.argsort(self.output, kind="stable")
        p = torch.from_numpy(TARGET[self.before[order]])
        favourites = torch.from_numpy(FAVOURITES[self.before[order]])
        return reduce_rows(p, torch.from_numpy(self.token[order]), favourites, end_ids=[0])


def decode(table: np.ndarray, outputs: int, most: int, seed: int) -> Tokens:
    """Autoregressive sampling from a table; an output ends with token 0 or after `most` tokens."""
    rng = np.random.default_rng(seed)
    live, state, found = np.arange(outputs), np.full(outputs, 1), []
    for _ in range(most):
        token = sample_rows(table, state, rng)
        found.append((state, token, live))
        live, state = live[token != 0], token[token != 0]
    return Tokens(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


@dataclass(frozen=True)
class RoundTokens:
    """Tokens of speculative decoding, with their index in the round and what the round accepted."""

    tokens: Tokens
    index: np.ndarray
    accepted: np.ndarray


def speculate(outputs: int, rounds: int, lookahead: int, seed: int) -> RoundTokens:
    """Exact speculative sampling (Leviathan et al. 2023), outputs side by side, no early end."""
    rng = np.random.default_rng(seed)
    state, found = np.full(outputs, 1), []
    everyone = np.arange(outputs)
    for _ in range(rounds):
        open_, current, accepted, emitted = (
            np.full(outputs, True),
            state.copy(),
            np.zeros(outputs, int),
            [],
        )
        for i in range(lookahead):
            drafted = sample_rows(DRAFT, current, rng)
            ratio = TARGET[current, drafted] / DRAFT[current, drafted]
            keep = rng.random(outputs) < ratio
            left = np.maximum(TARGET - DRAFT, 0)
            residual = left / left.sum(1, keepdims=True)
            token = np.where(keep, drafted, sample_rows(residual, current, rng))
            emitted.append((current[open_], token[open_], everyone[open_], i))
            current = np.where(open_, token, current)
            open_ = open_ & keep
            accepted += open_
        bonus = sample_rows(TARGET, current, rng)
        emitted.append((current[open_], bonus[open_], everyone[open_], lookahead))
        state = np.where(open_, bonus, current)
        found += [(b, t, o, np.full(len(b), i), accepted[o]) for b, t, o, i in emitted]
    before, token, output, index, accepted = (np.concatenate(c) for c in zip(*found, strict=True))
    return RoundTokens(Tokens(before, token, output), index, accepted)
