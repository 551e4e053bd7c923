"""Every tree of candidates that can be drafted, with its probability, by running the real code.

The draws are `impl.engine.tree_drafter`'s, their random numbers integrated out; growing and cutting
are `CandidateTree`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.decoder import SamplingParams
from harness.equivalence.exact_cases import Row, SmallDrafter, Tokens
from harness.equivalence.pieces import UNUSED, cumulative, pieces
from impl.engine import tree_drafter
from impl.engine.candidate_tree import CandidateTree, Siblings, TreePlan
from impl.engine.sampling import Draft, TreeDraft
from impl.engine.token_tree import ROOT


class _Drawn(NamedTuple):
    """Children that can be drawn behind a node, their q [Vd] (None: point masses), probability."""

    siblings: Siblings
    q: Tensor | None
    weight: float


class TreeDrafts:
    """All trees that can grow behind a text."""

    def __init__(
        self, plan: TreePlan, params: SamplingParams, drafter: SmallDrafter, text: Tokens
    ) -> None:
        self._plan, self._params, self._drafter, self._root = plan, params, drafter, text
        self._ids = drafter.head_ids()
        self._known: dict[tuple[Tokens, int], list[_Drawn]] = {}

    def drafts(self) -> Iterator[tuple[Draft, float]]:
        """Each finished tree once, with its probability."""
        found: dict[tuple[Tokens, Tokens], tuple[Draft, float]] = {}
        tree = CandidateTree(self._plan, len(self._plan.children))
        for draft, weight in self._grow(tree, (), 1.0):
            key = tuple(draft.tokens.tolist()), draft.parents
            found[key] = draft, weight + found.get(key, (draft, 0.0))[1]
        yield from found.values()

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
            return self._root
        return (*self._text(tree, tree.parents[node]), tree.tokens[node])

    def _children(self, text: Tokens, count: int) -> list[_Drawn]:
        if (text, count) not in self._known:
            self._known[text, count] = list(self._draws(text, count, (), 1.0))
        return self._known[text, count]

    def _draws(
        self, text: Tokens, count: int, uniforms: tuple[float, ...], weight: float
    ) -> Iterator[_Drawn]:
        """Walks down the siblings, behind those that `uniforms` have drawn."""
        fixed = self._params.temperature == 0 or self._drafter.drawn == 0
        drawn = self._draw(text, count, None if fixed else uniforms)
        (siblings,), q = drawn.siblings, drawn.q
        if q is None or len(uniforms) == len(siblings.tokens):
            yield _Drawn(siblings, None if q is None else q[0], weight)
            return
        left = self._without(q[0], siblings.tokens[: len(uniforms)])
        found = pieces(
            lambda u: self._draw(text, count, (*uniforms, u)).siblings[0].tokens[len(uniforms)],
            cumulative(left),
        )
        for _, middle, length in found:
            yield from self._draws(text, count, (*uniforms, middle), weight * length)

    def _draw(
        self, text: Tokens, count: int, uniforms: Sequence[float] | None
    ) -> tree_drafter.DrawnChildren:
        logits = torch.tensor(self._drafter.model.logits(text))[None]
        count = min(count, logits.shape[-1])
        row = None
        if uniforms is not None:
            row = np.array([[*uniforms, *(UNUSED,) * (count - len(uniforms))]])
        return tree_drafter.draw_children(logits, self._params, count, row, self._ids)

    def _without(self, q: Tensor, tokens: Sequence[int]) -> Row:
        """A q row with these tokens' columns zeroed."""
        left: Row = q.numpy().copy()
        ids = np.arange(len(left)) if self._ids is None else self._ids.numpy()
        left[np.isin(ids, tokens)] = 0
        return left
