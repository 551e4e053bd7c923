"""Drafting trees on the target's own device: one draft pass a level, all sequences together."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from harness.decoder import SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine import sampling
from impl.engine.candidate_tree import Candidates, CandidateTree, Siblings, TreePlan
from impl.engine.language_model import LanguageModel
from impl.engine.randomness import Role
from impl.engine.sampling import TreeDraft, Verification
from impl.engine.sequence import Sequence
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import ROOT, TokenTree

_AS_IS = SamplingParams(temperature=1.0)  # a greedy draft ranks by its untempered likelihoods


@dataclass(frozen=True, slots=True, eq=False)
class DrawnChildren:
    """What was drawn behind n nodes.

    Attributes:
        siblings: of each node.
        q: the distributions [n, Vd] they were drawn from; None for point masses.
    """

    siblings: list[Siblings]
    q: torch.Tensor | None


def draw_children(
    logits: torch.Tensor,
    params: SamplingParams,
    count: int,
    uniforms: NDArray[np.float64] | None,
    head_ids: torch.Tensor | None,
) -> DrawnChildren:
    """Draws up to `count` different tokens behind each of n nodes.

    Args:
        logits: [n, Vd].
        params: how to draw.
        count: tokens behind a node; fewer where its q has fewer.
        uniforms: [n, count] in [0, 1), to draw from q without replacement; None takes the
            likeliest tokens, as point masses.
        head_ids: target ids of the Vd columns; None when they are the same.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf, or nothing but -inf.
    """
    q = sampling.probabilities(logits, _AS_IS if params.temperature == 0 else params)
    left, columns, best = q.clone(), [], []
    for j in range(count):
        best.append(left.amax(-1))
        if uniforms is None:
            column = sampling.argmax(left)
        else:  # a row with nothing left gives no token, whatever stands in its place
            column = sampling.sample(left, torch.from_numpy(uniforms[:, j]).to(left.device))
            column.clamp_(max=left.shape[-1] - 1)
        columns.append(column)
        left.scatter_(-1, column[:, None], 0)
    drawn = torch.stack(columns, dim=-1)
    tokens = drawn if head_ids is None else head_ids[drawn]
    rows = (tokens, q.gather(-1, drawn), torch.stack(best, dim=-1))
    siblings = [_some(*row) for row in zip(*(values.tolist() for values in rows), strict=True)]
    return DrawnChildren(siblings, None if uniforms is None else q)


def _some(tokens: list[int], likelihoods: list[float], best: list[float]) -> Siblings:
    """Those drawn while anything was left."""
    count = sum(value > 0 for value in best)
    return Siblings(tokens[:count], likelihoods[:count], best[:count])


@dataclass(slots=True)
class _Growth:
    """A tree in the making.

    Attributes:
        sequence: whose.
        tree: its candidates.
        cells: what was fed in this round: unsettled tokens of the text, then candidates.
        draws: the random numbers of its draws; empty when nothing is random.
        node_of: number in `cells` of each candidate that was fed; of the root, the pending token.
        used: how many of the draws' numbers were used.
        seen: nodes of `cells` that earlier passes fed.
        rows: q's [fed, Vd] of the nodes fed, a tensor a level.
    """

    sequence: Sequence
    tree: CandidateTree
    cells: TokenTree
    draws: NDArray[np.float64] | None
    node_of: dict[int, int]
    used: int = 0
    seen: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)
    kept: tuple[int, ...] = ()

    def feed(self) -> None:
        """Gives the frontier cells of its own."""
        for node in self.tree.frontier:
            if node != ROOT:
                parent = self.node_of[self.tree.parents[node]]
                self.node_of[node] = self.cells.add(self.tree.tokens[node], parent)

    def take_uniforms(self, nodes: int, count: int) -> NDArray[np.float64] | None:
        """The next numbers, [nodes, count]."""
        if self.draws is None:
            return None
        first, self.used = self.used, self.used + nodes * count
        return self.draws[first : self.used].reshape(nodes, count)

    def as_draft(self, ids: torch.Tensor | None) -> TreeDraft:
        """The finished tree, in the form that verification takes."""
        found: Candidates = self.tree.finish()
        self.kept = found.nodes
        tokens = torch.tensor(found.tokens, dtype=torch.int64)
        probs = torch.cat(self.rows) if self.rows else None
        return TreeDraft(tokens, probs, ids, found.parents, found.sources)


class TreeDrafter:
    """The draft model with its own cache, in step with the sequences of a decoder."""

    def __init__(
        self, model: LanguageModel, plan: TreePlan, slots: int, cells: int, *, sampled: bool = True
    ) -> None:
        """Allocates the cache.

        Args:
            model: the draft.
            plan: how trees grow.
            slots: most sequences at once.
            cells: most tokens of a sequence.
            sampled: at temperature > 0 draw siblings from q without replacement; else take the
                likeliest tokens.
        """
        self.model = model
        self.plan = plan
        self.sampled = sampled
        self.cache = model.new_cache(slots, cells + plan.scratch)
        self._growing: dict[int, _Growth] = {}  # slot -> the tree under verification

    def prefill(self, sequence: Sequence) -> None:
        """Caches all of the prompt but the pending token."""
        self.model.prefill(self.cache, sequence.slot, sequence.tokens[:-1])

    def propose(self, sequences: List[Sequence]) -> list[TreeDraft]:
        """A tree for each sequence, empty where a round has no use for one."""
        growing = [self._begin(sequence) for sequence in sequences]
        self._growing = {growth.sequence.slot: growth for growth in growing}
        while active := [growth for growth in growing if growth.tree.frontier]:
            self._grow(active)
        return [growth.as_draft(self.model.head_ids) for growth in growing]

    def settle(self, sequence: Sequence, outcome: Verification) -> None:
        """Keeps the cells of the accepted nodes. Call it before the sequence takes its tokens."""
        growth, slot = self._growing[sequence.slot], sequence.slot
        if not growth.seen:
            return
        path = (growth.kept[index] for index in outcome.nodes)
        fed = [growth.node_of[node] for node in path if node in growth.node_of]
        trunk = growth.cells.trunk
        self.cache.truncate(slot, trunk)
        settled = range(growth.node_of[ROOT] + 1)
        self.cache.gather(slot, growth.cells.cells([*settled, *fed]))

    def _begin(self, sequence: Sequence) -> _Growth:
        settled = self.cache.lengths[sequence.slot]
        unsettled = sequence.tokens[settled:]
        tree = CandidateTree(self.plan, sequence.draft_limit(len(self.plan.children)))
        cells = TokenTree(settled, len(unsettled) + self.plan.scratch)
        parent = ROOT
        for token in unsettled:
            parent = cells.add(token, parent)
        return _Growth(sequence, tree, cells, self._draws_of(sequence), {ROOT: parent})

    def _draws_of(self, sequence: Sequence) -> NDArray[np.float64] | None:
        """All random numbers that a tree can need; a stream of their own each round."""
        if sequence.request.sampling.temperature == 0 or not self.sampled:
            return None
        start, after = sequence.output_length, sequence.tokens[-1]
        return sequence.stream.uniforms(Role.DRAFT, start, self.plan.draws, after)

    def _grow(self, growing: List[_Growth]) -> None:
        """One pass over every frontier; each node fed gets its children."""
        for growth in growing:
            growth.feed()
        logits = self._pass(growing)
        counts = [len(growth.tree.frontier) for growth in growing]
        for growth, rows in zip(growing, torch.split(logits, counts), strict=True):
            self._draw(growth, rows)

    def _pass(self, growing: List[_Growth]) -> torch.Tensor:
        """Feeds what is new; the logits [nodes, Vd] behind the nodes of all frontiers."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        for growth in growing:
            cells, first = growth.cells, growth.seen
            count = len(cells) - first
            tokens += cells.tokens[first:]
            positions += cells.positions(first)
            mask = cells.mask(first) if first else None  # at first a chain
            segments.append(Segment(growth.sequence.slot, cells.trunk + first, count, mask))
            wanted += range(len(tokens) - len(growth.tree.frontier), len(tokens))
            growth.seen = len(cells)
        batch = TokenBatch.pack(tokens, positions, segments)
        return self.model.forward(batch, self.cache, rows=torch.tensor(wanted))

    def _draw(self, growth: _Growth, logits: torch.Tensor) -> None:
        sequence, tree = growth.sequence, growth.tree
        count = min(tree.wanted, logits.shape[-1])
        uniforms = growth.take_uniforms(len(logits), count)
        try:
            params = sequence.request.sampling
            drawn = draw_children(logits, params, count, uniforms, self.model.head_ids)
        except NonFiniteLogitsError as error:
            at = sequence.output_length + tree.level
            name = sequence.request.request_id
            raise NonFiniteLogitsError(
                f"request {name}, output position {at}: draft {error}"
            ) from error
        tree.extend(drawn.siblings)
        if drawn.q is not None:
            growth.rows.append(drawn.q)
