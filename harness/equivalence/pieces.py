"""Integrating a uniform out: the intervals of [0, 1) on which a decision stays the same.

A decision is tried at both ends of every interval between the points at which an exact one changes;
where the two ends disagree the interval is bisected. An interval's length is its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from harness.equivalence.exact_cases import Row

UNUSED = 0.5  # stands for a uniform that an exact decision does not look at
_NEAR = 1e-12  # how far inside an interval its ends are tried
_NARROW = 1e-11  # bisection stops here


class Piece(NamedTuple):
    """An interval of a uniform on which a decision, a token or an acceptance, is the same."""

    decision: int
    middle: float
    length: float


def normalised(weights: Row) -> Row:
    """Divided by their sum; nothing stays nothing."""
    total = weights.sum()
    return weights / total if total > 0 else weights


def cumulative(weights: Row) -> list[float]:
    """Where an inverse-CDF draw changes from one token to the next."""
    total = weights.sum()
    return list(np.cumsum(weights) / total) if total > 0 else []


def pieces(decide: Callable[[float], int], edges: Sequence[float]) -> list[Piece]:
    """Splits [0, 1] where a decision changes; an exact one changes at `edges` only."""
    points = np.unique([0.0, 1.0, *(edge for edge in edges if 0 < edge < 1)])
    found: list[Piece] = []
    for low, high in pairwise(points.tolist()):
        near = min(_NEAR, (high - low) / 4)
        ends = decide(low + near if low else 0.0), decide(high - near)
        found += _bisect(decide, low, high, *ends)
    return [_merge(list(same)) for _, same in groupby(found, key=lambda piece: piece.decision)]


def _merge(pieces: Sequence[Piece]) -> Piece:
    """One piece for neighbours that agree."""
    low = pieces[0].middle - pieces[0].length / 2
    length = sum(piece.length for piece in pieces)
    return Piece(pieces[0].decision, low + length / 2, length)


def _bisect(
    decide: Callable[[float], int], low: float, high: float, first: int, last: int
) -> list[Piece]:
    """Pieces of an interval, given the decisions at its ends; where they agree there is one."""
    middle = (low + high) / 2
    if first == last or high - low < _NARROW:
        return [Piece(first, middle, high - low)]
    between = decide(middle)
    return [
        *_bisect(decide, low, middle, first, between),
        *_bisect(decide, middle, high, between, last),
    ]
