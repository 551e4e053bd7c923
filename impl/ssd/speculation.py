r"""One sequence on the draft's side: the trunk under verification and the branches ahead of it.

    settled tokens | t*  s_1  s_2 ... s_K           the trunk: what the target is verifying now
                      \    \
                       t   t'  -> its own tokens     branches: speculations for guessed outcomes

Trunk and branches are paths. A path's tokens become nodes of one token tree in the order in which
they are fed, so a path can wait while others grow; the nodes are cells behind the settled ones.
Pure bookkeeping: it says what has not been fed and takes the logits; it runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from harness.decoder import CacheOutcome
from impl.engine.ngram import NgramIndex
from impl.engine.sequence import Sequence
from impl.engine.token_tree import ROOT, TokenTree
from impl.ssd.fallback import BackupName
from impl.ssd.fan_out import FanOut
from impl.ssd.speculation_cache import Outcome, SpeculationCache


def tree_capacity(lookahead: int, budget: int) -> int:
    """Nodes at most: an unsettled accepted token, t* and K drafted; each branch's start and K."""
    return (2 + lookahead) + budget * (1 + lookahead)


@dataclass(slots=True, eq=False)
class Path:
    """A chain of drafted tokens behind a start token.

    Attributes:
        tokens: target ids of the start token (t* or a guess of it), then of the drafted tokens.
        parent: the node behind which the start token stands.
        ahead: how many output tokens lie between the trunk's t* and the start token.
        wanted: how many tokens to draft at most.
        chance: the estimated chance that its outcome is the one that happens; 1 for the trunk.
        reach: the estimated chance that all its drafted tokens are accepted once it has happened.
        nodes: tree nodes of the tokens that have been fed, the first ones.
        logits: the draft's logits [Vd] behind each node.
        q: the distribution [Vd] that each drafted token was drawn from; empty for point masses.
        confidences: the draft's probability of each drafted token.
    """

    tokens: list[int]
    parent: int
    ahead: int
    wanted: int
    chance: float = 1.0
    reach: float = 1.0
    nodes: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """How many tokens have been drafted."""
        return len(self.tokens) - 1

    @property
    def complete(self) -> bool:
        """Whether all the wanted tokens are there."""
        return self.drafted >= self.wanted

    @property
    def usable(self) -> bool:
        """Whether it is a speculation: it has a token, or wants none."""
        return self.drafted > 0 or self.complete

    @property
    def fed(self) -> bool:
        """Whether every token has been fed."""
        return len(self.nodes) == len(self.tokens)


class SequenceSpeculation:
    """The state of one sequence between two verifications.

    Attributes:
        sequence: its tokens and stopping rules, in step with the decoder's.
        ngrams: of its text, for the fast backup.
        tree: the nodes that have been fed since the last outcome.
        settled: tokens that are settled but not fed, to be fed ahead of the trunk.
        trunk: the speculation that the decoder was given last, growing until it is handed over.
        cache: the branches by the outcome they are for.
        elsewhere: guessed outcomes whose branches other replicas of the draft have.
        guesses: outcomes that were speculations when the latest one came.
        hit_chance: the estimated chance that it was among them; None before the first.
        after: how the trunk was found: after a hit, a miss, or None at the sequence's start.
        backup: what drafted the trunk after a miss.
        given: the trunk's tokens come from elsewhere, so that all of them are to be fed.
        lookahead: how many tokens new paths want.
        building: the trunk has been handed over and the cache is being filled.
        fan_out: guesses for each position of the trunk; None until they are decided.
        opened: positions of the trunk whose outcomes have been guessed.
        rank: 1-based place of the latest t* among what would have been guessed; None: not known.
    """

    def __init__(self, sequence: Sequence, lookahead: int, capacity: int, budget: int) -> None:
        """`capacity`: most nodes between two verifications (see `tree_capacity`)."""
        self.sequence = sequence
        self.ngrams = NgramIndex(sequence.tokens)
        self.lookahead = lookahead
        self.cache: SpeculationCache[Path] = SpeculationCache(budget)
        self.elsewhere: set[Outcome] = set()
        self.guesses = 0
        self.hit_chance: float | None = None
        self.after: CacheOutcome | None = None
        self.backup: BackupName | None = None
        self.given = False
        self.building = False
        self.fan_out: FanOut | None = None
        self.opened = 0
        self.rank: int | None = None
        self._capacity = capacity
        self.tree = TokenTree(len(sequence.tokens) - 1, self._capacity)
        self.settled: list[int] = []
        self.trunk = self._start_trunk(sequence.tokens[-1])

    def feed(self, path: Path) -> None:
        """Makes nodes of a path's tokens that have not been fed; of settled ones before them."""
        if path is self.trunk and not path.nodes:
            for token in self.settled:
                path.parent = self.tree.add(token, path.parent)
        for token in path.tokens[len(path.nodes) :]:
            path.nodes.append(self.tree.add(token, path.nodes[-1] if path.nodes else path.parent))

    def open_branches(self, outcomes: list[Outcome], chances: list[float]) -> None:
        """Starts a branch for each guessed outcome, each with its chance."""
        for outcome, chance in zip(outcomes, chances, strict=True):
            ahead = outcome.accepted + 1
            wanted = self.sequence.draft_limit(self.lookahead + ahead) - ahead
            parent = self.trunk.nodes[outcome.accepted]
            branch = Path([outcome.token], parent, ahead, max(0, wanted), chance)
            self.cache.insert(outcome, branch)

    def resolve(self, outcome: Outcome) -> list[int]:
        """Takes the verification's outcome: settles the accepted tokens, makes a hit the new trunk.

        An outcome that was guessed but for which nothing has been drafted is a miss.

        Returns:
            The cells to gather behind the settled ones, in order.
        """
        prepared = [path for path in self.cache.values() if path.usable]
        self.guesses, self.hit_chance = len(prepared), sum(path.chance for path in prepared)
        trunk, hit = self.trunk, self.cache.lookup(outcome)
        if hit is not None and not hit.usable:
            hit = None
        self.after = CacheOutcome.MISS if hit is None else CacheOutcome.HIT
        settled = trunk.tokens[: outcome.accepted + 1]
        nodes = trunk.nodes[: outcome.accepted + 1]
        kept = [*range(nodes[0] if nodes else 0), *nodes, *(hit.nodes if hit else ())]
        cells = self.tree.cells(kept)
        before = [] if nodes else self.settled
        self.settled = [*before, *settled[len(nodes) :]]
        self.sequence.append([*settled[1:], outcome.token])
        self._replant(hit)
        return cells

    def adopt(
        self,
        tokens: Iterable[int],
        confidences: Iterable[float],
        after: CacheOutcome | None,
        backup: BackupName | None,
    ) -> None:
        """Takes over the trunk of another replica, which this one has not fed."""
        self._replant(None)
        self.trunk.tokens += tokens
        self.trunk.confidences += confidences
        self.trunk.wanted = self.trunk.drafted
        self.after, self.backup, self.given = after, backup, True

    def _replant(self, hit: Path | None) -> None:
        """A new tree behind the settled tokens, holding t* and what was speculated behind it."""
        self.tree = TokenTree(len(self.sequence.tokens) - 1 - len(self.settled), self._capacity)
        self.cache.clear()
        self.elsewhere.clear()
        self.building, self.fan_out, self.opened = False, None, 0
        self.backup, self.given = None, False
        self.trunk = self._start_trunk(self.sequence.tokens[-1])
        if hit is None:
            return
        fed = len(hit.nodes)
        self.trunk.tokens, self.trunk.reach = hit.tokens[:fed], hit.reach
        self.feed(self.trunk)
        self.trunk.tokens = hit.tokens
        self.trunk.logits, self.trunk.q = hit.logits, hit.q
        self.trunk.confidences = hit.confidences

    def _start_trunk(self, token: int) -> Path:
        return Path([token], ROOT, ahead=0, wanted=self.sequence.draft_limit(self.lookahead))
