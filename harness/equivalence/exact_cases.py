"""Small situations in which a verification can be enumerated, for every method.

A case is a pair of models over a handful of tokens, sampling parameters and a number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from harness.decoder import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from impl.engine.candidate_tree import TreePlan
    from impl.engine.drafter import Drawn

Tokens = tuple[int, ...]
Row = NDArray[np.float64]


class Draw(Protocol):
    """`impl.engine.drafter.draw`, or a broken one."""

    def __call__(
        self,
        logits: Tensor,
        params: SamplingParams,
        uniforms: Sequence[float],
        head_ids: Tensor | None,
    ) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model over a few tokens.

    Attributes:
        vocab: number of logits.
        seed: logits are random, but fixed for each text.
        masked: logits that are -inf at every text.
        sparse: half of the logits, others at each text, are -inf.
        fixed: the probabilities at every text instead.
    """

    vocab: int
    seed: int = 0
    masked: frozenset[int] = frozenset()
    sparse: bool = False
    fixed: tuple[float, ...] | None = None

    def logits(self, text: Tokens) -> Row:
        """[vocab], of the token behind `text`."""
        if self.fixed is not None:
            return np.array([math.log(p) for p in self.fixed])
        random = np.random.default_rng([self.seed, *text])
        logits: Row = random.normal(scale=1.5, size=self.vocab)
        if self.sparse:
            logits[random.permutation(self.vocab)[: self.vocab // 2]] = -np.inf
        logits[list(self.masked)] = -np.inf
        return logits


@dataclass(frozen=True, slots=True)
class SmallDrafter:
    """Where drafted tokens come from.

    Attributes:
        model: gives the draft logits.
        ids: target ids of its columns (a trimmed vocabulary); None when they are the same.
        drawn: how many tokens are drawn from q; those behind are point masses on the likeliest
            token, as a filler or an n-gram continuation is. None draws all.
        draw: how a token is drawn; the engine's way by default.
        stop_below: the draft ends behind a token that it holds less likely than this.
    """

    model: SmallModel
    ids: Tokens | None = None
    drawn: int | None = None
    draw: Draw | None = None
    stop_below: float = 0.0

    def head_ids(self) -> Tensor | None:
        """Target ids of its columns, int64 [Vd]; None when they are the same."""
        import torch

        return None if self.ids is None else torch.tensor(self.ids)


@dataclass(frozen=True, slots=True)
class ChainRound:
    """A round of a method whose draft goes on by itself.

    Attributes:
        waits_for: drafted tokens that must be there before the target's pass.
        most: how many of those that are there it is fed.
        beside: tokens that are drafted beside the pass. The first that was not fed is judged too.
    """

    waits_for: int
    most: int
    beside: int


@dataclass(frozen=True, slots=True)
class Case:
    """A situation to enumerate.

    Attributes:
        name: for the report.
        target: the model whose distribution is wanted.
        params: how target and draft draw.
        lookahead: K; 0 drafts nothing (autoregressive decoding).
        drafter: drafts the first round and, where there are more, those after a hit.
        rounds: how many rounds follow each other.
        backup: drafts after a miss.
        fan_out: guesses at each of the K + 1 positions of a round.
        tree: how a tree of candidates grows, `lookahead` levels deep, instead of a chain. Its
            candidates are the likeliest tokens if the drafter draws none (`drawn` = 0).
        chain: the rounds of a draft that goes on by itself, each feeding `lookahead` tokens or
            fewer; `drafter` drafts them all.
    """

    name: str
    target: SmallModel
    params: SamplingParams
    lookahead: int
    drafter: SmallDrafter
    rounds: int = 1
    backup: SmallDrafter | None = None
    fan_out: Tokens = ()
    tree: TreePlan | None = None
    chain: tuple[ChainRound, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the compared sequences: the most that the rounds can emit."""
        return (len(self.chain) or self.rounds) * (self.lookahead + 1)


@dataclass(frozen=True, slots=True)
class Reweighted:
    """Saguaro sampling: draws from q with its `top` likeliest tokens multiplied by `c`."""

    top: int
    c: float

    def __call__(
        self,
        logits: Tensor,
        params: SamplingParams,
        uniforms: Sequence[float],
        head_ids: Tensor | None,
    ) -> Drawn:
        """See `Draw`."""
        from impl.engine.drafter import draw
        from impl.ssd.saguaro_sampling import reweight

        return draw(logits, params, uniforms, head_ids, lambda q: reweight(q, self.top, self.c))


TARGET = SmallModel(3, seed=1)
DRAFT = SmallModel(3, seed=2)
PARAMS = (
    SamplingParams(0.0),
    SamplingParams(0.5),
    SamplingParams(1.0),
    SamplingParams(2.0),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(0.7, top_k=2, top_p=0.8),
)
# Every kind of draft: target, then drafter.
DRAFTS = {
    "dense": (TARGET, SmallDrafter(DRAFT)),
    "zeros in q": (TARGET, SmallDrafter(SmallModel(3, seed=2, sparse=True))),
    "zeros in p": (SmallModel(3, seed=1, masked=frozenset({1})), SmallDrafter(DRAFT)),
    "disjoint supports": (
        SmallModel(4, seed=1, masked=frozenset({0, 2})),
        SmallDrafter(SmallModel(2, seed=2), ids=(0, 2)),
    ),
    "point mass": (TARGET, SmallDrafter(DRAFT, drawn=0)),
    "drawn, then filler": (TARGET, SmallDrafter(DRAFT, drawn=1)),
    "trimmed vocabulary": (TARGET, SmallDrafter(SmallModel(2, seed=2), ids=(0, 2))),
    "trimmed to one token": (TARGET, SmallDrafter(SmallModel(1, seed=2), ids=(2,))),
    "smaller vocabulary": (TARGET, SmallDrafter(SmallModel(2, seed=2))),
    "padded beyond the target": (TARGET, SmallDrafter(SmallModel(4, seed=2))),
    "Saguaro C = 0.5": (TARGET, SmallDrafter(DRAFT, draw=Reweighted(2, 0.5))),
    "stopped when unsure": (TARGET, SmallDrafter(DRAFT, stop_below=0.5)),
    "trimmed, stopped when unsure": (
        TARGET,
        SmallDrafter(SmallModel(2, seed=2), ids=(0, 2), stop_below=0.6),
    ),
    "Saguaro C = 0": (TARGET, SmallDrafter(DRAFT, draw=Reweighted(1, 0.0))),
}
TREE_DRAFTS = ("dense", "zeros in q", "zeros in p", "point mass", "trimmed vocabulary")
_SPECULATED = SmallDrafter(DRAFT, draw=Reweighted(1, 0.5))
BACKUPS = {
    "neural backup": SmallDrafter(DRAFT),
    "fast backup": SmallDrafter(SmallModel(3, seed=3), drawn=0),
}


def default_cases() -> tuple[Case, ...]:
    """Every method under all parameters: about 150 cases, a few seconds."""
    return (
        *autoregressive_cases(),
        *speculative_cases(),
        *saguaro_cases(),
        *tree_cases(),
        *chain_cases(),
    )


def autoregressive_cases() -> tuple[Case, ...]:
    """AR: a round verifies an empty draft."""
    return tuple(
        Case(f"ar, {describe(params)}", SmallModel(5, seed=1), params, 0, SmallDrafter(DRAFT))
        for params in PARAMS
    )


def speculative_cases() -> tuple[Case, ...]:
    """A chain of drafted tokens, by every kind of draft: SD, and each round of the others."""
    return tuple(
        Case(f"chain, {name}, {describe(params)}", target, params, 2, drafter)
        for (name, (target, drafter)), params in product(DRAFTS.items(), PARAMS)
    )


def saguaro_cases() -> tuple[Case, ...]:
    """SSD: a second round after a hit (the branch's q) or a miss (the backup's q)."""
    return tuple(
        Case(
            f"ssd, {name}, {describe(params)}",
            TARGET,
            params,
            lookahead=1,
            drafter=_SPECULATED,
            rounds=2,
            backup=backup,
            fan_out=(1, 1),
        )
        for (name, backup), params in product(BACKUPS.items(), PARAMS)
    )


def tree_plans() -> dict[str, TreePlan]:
    """Small trees of each kind."""
    from impl.engine.candidate_tree import TreePlan

    return {
        "static": TreePlan.static((2, 1)),
        "dynamic": TreePlan.dynamic(nodes=3, depth=2, branching=2),
    }


def tree_cases() -> tuple[Case, ...]:
    """Trees of candidates, each by the kind of draft that is hardest on it, and dense ones."""
    return tuple(
        Case(
            f"tree, {plan_name}, {name}, {describe(params)}",
            DRAFTS[name][0],
            params,
            len(plan.children),
            DRAFTS[name][1],
            tree=plan,
        )
        for (plan_name, plan), name, params in product(tree_plans().items(), TREE_DRAFTS, PARAMS)
    )


CHAINS = {
    # Two tokens, then what the first round has left; the draft is one to two tokens ahead.
    "amusd, drafting on": (ChainRound(1, 2, 2), ChainRound(1, 2, 1)),
    # Nothing is drafted beside the passes: bonus tokens.
    "amusd, bonus tokens": (ChainRound(2, 2, 0), ChainRound(1, 2, 0)),
    # Blocks of two: pre-verify; then post-verify, or pre-verify again.
    "pearl": (ChainRound(0, 2, 2), ChainRound(0, 2, 2)),
}


def chain_cases() -> tuple[Case, ...]:
    """AMUSD and PEARL: two rounds, the second with what the first has left of the chain."""
    return tuple(
        Case(f"{name}, {describe(params)}", TARGET, params, 2, SmallDrafter(DRAFT), chain=rounds)
        for (name, rounds), params in product(CHAINS.items(), PARAMS)
    )


def describe(params: SamplingParams) -> str:
    """Sampling parameters in words, those that are off left out."""
    parts = [f"T = {params.temperature:g}"]
    parts += [f"top-k = {params.top_k}"] * bool(params.top_k)
    parts += [f"top-p = {params.top_p:g}"] * (params.top_p < 1)
    return ", ".join(parts)
