r"""One sequence on the draft's side: the trunk under verification and the branches ahead of it.

    settled tokens | t*  s_1  s_2 ... s_K           the trunk: what the target is verifying now
                      \    \
                       t   t'  -> its own tokens     branches: speculations for guessed outcomes

Trunk and branches are paths in one token tree whose nodes are cells behind the settled ones. Pure
bookkeeping: it says which tokens to feed and takes their logits; it runs no model.
"""

from __future__ import annotations

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
        nodes: tree nodes of the start token (t* or a guess of it), then of the drafted tokens.
        ahead: how many output tokens lie between the trunk's t* and the start token.
        wanted: how many tokens to draft.
        logits: the draft's logits [Vd] behind each node that has been fed.
        q: the distribution [Vd] that each drafted token was drawn from; empty for point masses.
        confidences: the draft's probability of each drafted token.
    """

    nodes: list[int]
    ahead: int
    wanted: int
    logits: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """How many tokens have been drafted."""
        return len(self.nodes) - 1

    @property
    def complete(self) -> bool:
        """Whether all the wanted tokens are there."""
        return self.drafted >= self.wanted


class SequenceSpeculation:
    """The state of one sequence between two verifications.

    Attributes:
        sequence: its tokens and stopping rules, in step with the decoder's.
        ngrams: of its text, for the fast backup.
        tree: trunk and branches; nodes before `fed` have been fed to the draft model.
        trunk: the speculation that the decoder was given last, growing until it is handed over.
        cache: the branches by the outcome they are for.
        after: how the trunk was found: after a hit, a miss, or None at the sequence's start.
        backup: what drafted the trunk after a miss.
        lookahead: how many tokens new paths want.
        building: the trunk has been handed over and the cache is being filled.
        fan_out: guesses for each position of the trunk; None until they are decided.
        opened: positions of the trunk whose outcomes have been guessed.
    """

    def __init__(self, sequence: Sequence, lookahead: int, capacity: int, budget: int) -> None:
        """`capacity`: most nodes between two verifications (see `tree_capacity`)."""
        self.sequence = sequence
        self.ngrams = NgramIndex(sequence.tokens)
        self.lookahead = lookahead
        self.cache: SpeculationCache[Path] = SpeculationCache(budget)
        self.after: CacheOutcome | None = None
        self.backup: BackupName | None = None
        self.building = False
        self.fan_out: FanOut | None = None
        self.opened = 0
        self._capacity = capacity
        self.tree = TokenTree(len(sequence.tokens) - 1, self._capacity)
        self.fed = 0
        self.trunk = self._start_trunk(sequence.tokens[-1], ROOT)

    def drafted_tokens(self, path: Path) -> list[int]:
        """Target ids of a path's drafted tokens."""
        return [self.tree.tokens[node] for node in path.nodes[1:]]

    def paths(self) -> list[Path]:
        """The trunk and every branch."""
        return [self.trunk, *self.cache.values()]

    @property
    def finished(self) -> bool:
        """Whether every branch is complete and the trunk's last token has been fed."""
        trunk_fed = len(self.trunk.logits) == len(self.trunk.nodes)
        return trunk_fed and all(path.complete for path in self.cache.values())

    def extend(self, path: Path, token: int) -> None:
        """Appends a drafted token to a path."""
        path.nodes.append(self.tree.add(token, path.nodes[-1]))

    def open_branches(self, outcomes: list[Outcome]) -> None:
        """Starts a branch for each guessed outcome."""
        for outcome in outcomes:
            ahead = outcome.accepted + 1
            wanted = self.sequence.draft_limit(self.lookahead + ahead) - ahead
            node = self.tree.add(outcome.token, self.trunk.nodes[outcome.accepted])
            self.cache.insert(outcome, Path([node], ahead, max(0, wanted)))

    def resolve(self, outcome: Outcome) -> list[int]:
        """Takes the verification's outcome: settles the accepted tokens, makes a hit the new trunk.

        Returns:
            The cells to gather behind the settled ones, in order.
        """
        hit = self.cache.lookup(outcome)
        self.after = CacheOutcome.MISS if hit is None else CacheOutcome.HIT
        first = self.trunk.nodes[0]
        settled = [*range(first), *self.trunk.nodes[: outcome.accepted + 1]]
        kept = [node for node in (*settled, *(hit.nodes if hit else ())) if node < self.fed]
        cells = self.tree.cells(kept)
        self._replant(settled, outcome, hit)
        return cells

    def _replant(self, settled: list[int], outcome: Outcome, hit: Path | None) -> None:
        """A new tree behind the settled tokens, holding t* and what was speculated behind it."""
        old, fed = self.tree, self.fed
        unfed = [old.tokens[node] for node in settled if node >= fed]  # s_K at most
        self.sequence.append([*self.drafted_tokens(self.trunk)[: outcome.accepted], outcome.token])
        self.tree = TokenTree(len(self.sequence.tokens) - 1 - len(unfed), self._capacity)
        self.fed = sum(node < fed for node in hit.nodes) if hit else 0
        self.cache.clear()
        self.building, self.fan_out, self.opened, self.backup = False, None, 0, None
        parent = ROOT
        for token in unfed:
            parent = self.tree.add(token, parent)
        self.trunk = self._start_trunk(outcome.token, parent)
        if hit:
            for node in hit.nodes[1:]:
                self.extend(self.trunk, old.tokens[node])
            self.trunk.logits, self.trunk.q = hit.logits, hit.q
            self.trunk.confidences = hit.confidences

    def _start_trunk(self, token: int, parent: int) -> Path:
        wanted = self.sequence.draft_limit(self.lookahead)
        return Path([self.tree.add(token, parent)], ahead=0, wanted=wanted)
