"""Which candidates a draft tree holds: pure bookkeeping, one sequence and one round.

A tree grows level by level. Each level draws children for the nodes that were fed to the draft
model, ranks all candidates and names the nodes to feed next. A *dynamic* tree (EAGLE-2, Li et al.
2024, arXiv 2406.16858) feeds the nodes of highest joint draft probability and keeps the best
candidates of all levels; a *static* one (SpecInfer, Miao et al. 2024, arXiv 2305.09781) feeds and
keeps everything.

**Why a dynamic tree may be cut without bias.** Verification takes a child c_j of node v for a draw
from q_v without c_1 .. c_{j-1}. That must stay true of the children that are kept, so whether c_j
is kept must not depend on which token c_j is. Ranking by c_j's own joint probability would break
this: kept tokens would be likelier than their q says. So c_j is ranked by what is known before it
is drawn:

    priority(c_j) = joint(v) * max{ q_v(x) : x not in {c_1, ..., c_{j-1}} },
    joint(c_j) = joint(v) * q_v(c_j)

1. joint(c_j) <= priority(c_j), since c_j is one of the x. So priorities never rise from a node to
   its children or from a sibling to the next, and the best N form a tree without gaps.
2. The value of c_j changes joint(c_j) alone. It can move only things that rank behind c_j: the
   priorities below c_j and of its younger siblings, and, where the number of nodes fed per level is
   limited, the feeding of nodes w of its level with joint(w) <= joint(c_j) <= priority(c_j), whose
   children rank behind w and so behind c_j too. Ties rank the earlier candidate first: shallower
   levels before deeper ones, elder siblings before younger ones.
3. So which candidates rank before c_j, and with it whether c_j is among the best N, is settled
   before c_j is drawn. Given everything that it was settled by, c_j is a draw from q_v without
   c_1 .. c_{j-1}, as verification assumes. What verification learns on its way to c_j (its own
   random numbers, accepted ancestors, rejected elder siblings) was drawn before c_j or is
   independent of it, so nothing is biased along the path either.

When the children are the likeliest tokens instead of draws, no choice is random: the maximum is
c_j's own probability, the priority is its joint probability, and any cut is exact.
`harness.equivalence` enumerates all this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from impl.engine.token_tree import ROOT


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How a tree grows.

    Attributes:
        children: at each level, how many tokens are drawn behind a node that was fed.
        fed: most nodes of a level that are fed, those of highest joint draft probability.
        kept: most nodes of the finished tree.
    """

    children: tuple[int, ...]
    fed: int
    kept: int

    @classmethod
    def dynamic(cls, *, nodes: int, depth: int, branching: int) -> TreePlan:
        """At most `nodes` nodes on `depth` levels; a level feeds and draws by `branching`."""
        return cls((branching,) * depth, fed=branching, kept=nodes)

    @classmethod
    def static(cls, shape: Sequence[int]) -> TreePlan:
        """Every node of a level has as many children as `shape` says for it."""
        return cls(tuple(shape), fed=max(_widths(shape)), kept=sum(_widths(shape)))

    @property
    def most_fed(self) -> tuple[int, ...]:
        """How many nodes are fed before the children of each level are drawn, the root first."""
        return (1, *(min(self.fed, width) for width in _widths(self.children)[:-1]))

    @property
    def scratch(self) -> int:
        """Cells that the draft needs behind a sequence's own: drafted nodes that are fed."""
        return sum(self.most_fed) - 1

    @property
    def draws(self) -> int:
        """Random numbers that a tree needs, at most."""
        return sum(fed * count for fed, count in zip(self.most_fed, self.children, strict=True))


def _widths(children: Sequence[int]) -> list[int]:
    """Nodes of each level when none is cut."""
    return [math.prod(children[: level + 1]) for level in range(len(children))]


class Siblings(NamedTuple):
    """The tokens drawn behind one node, in order, fewer where q holds fewer.

    Attributes:
        tokens: target ids, all different.
        likelihoods: q of each.
        best: q of the likeliest token that was left before each was drawn.
    """

    tokens: Sequence[int]
    likelihoods: Sequence[float]
    best: Sequence[float]


class Candidates(NamedTuple):
    """The kept nodes, parents before children and elder siblings before younger ones.

    Attributes:
        nodes: their numbers in the grown tree.
        tokens: target ids.
        parents: the index that each one hangs on, or ROOT.
        sources: how many nodes had been fed before the one that each was drawn behind.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[int, ...]


class CandidateTree:
    """Grows by `extend`, once a level.

    Attributes:
        level: how many levels it has.
        frontier: the nodes to feed next; empty when it is finished.
        tokens: target id of each node, in the order in which they were drawn.
        parents: the node that each one hangs on, or ROOT.
    """

    def __init__(self, plan: TreePlan, depth: int) -> None:
        """Starts with nothing but the root, the text so far.

        Args:
            plan: how to grow.
            depth: most levels; the plan may have fewer.
        """
        self._plan = plan
        self._depth = min(depth, len(plan.children))
        self.level = 0
        self._fed = 0
        self.frontier: list[int] = [ROOT] if self._depth else []
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._sources: list[int] = []
        self._joint: list[float] = []
        self._priority: list[float] = []

    @property
    def wanted(self) -> int:
        """How many children to draw behind each node of the frontier."""
        return self._plan.children[self.level]

    def extend(self, drawn: Sequence[Siblings]) -> None:
        """Takes the children of each node of the frontier, decides what to feed next."""
        first = len(self.tokens)
        for parent, siblings in zip(self.frontier, drawn, strict=True):
            self._add(parent, siblings)
            self._fed += 1
        self.level += 1
        self.frontier = self._choose(first) if self.level < self._depth else []

    def _add(self, parent: int, siblings: Siblings) -> None:
        above = 1.0 if parent == ROOT else self._joint[parent]
        for token, likelihood, best in zip(*siblings, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self._sources.append(self._fed)
            self._joint.append(above * likelihood)
            self._priority.append(above * best)

    def _choose(self, first: int) -> list[int]:
        """The likeliest of the nodes from `first` on; one that will be cut has no use for children.

        Candidates of later levels only push nodes further back, so what is cut now stays cut.
        """
        fresh = [node for node in self._kept() if node >= first]
        fresh.sort(key=lambda node: (-self._joint[node], node))
        return sorted(fresh[: self._plan.fed])

    def _kept(self) -> list[int]:
        """The best nodes so far, in order of their numbers."""
        ranked = sorted(range(len(self.tokens)), key=lambda node: (-self._priority[node], node))
        return sorted(ranked[: self._plan.kept])

    def finish(self) -> Candidates:
        """The best nodes, renumbered."""
        kept = self._kept()
        index = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Candidates(
            tuple(kept),
            tuple(self.tokens[node] for node in kept),
            tuple(index[self.parents[node]] for node in kept),
            tuple(self._sources[node] for node in kept),
        )
