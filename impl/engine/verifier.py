"""The target's half of every method: a pass over pending and drafted tokens, then accept/reject."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

import torch

from harness.decoder import Span, SpanKind
from harness.errors import NonFiniteLogitsError
from impl.engine.device import wait_for
from impl.engine.device_verification import Case, verifications
from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.randomness import Role
from impl.engine.sampling import Draft, TreeDraft, Verification
from impl.engine.sequence import Sequence
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import TokenTree


class Scored(NamedTuple):
    """The target's logits [K+1, V] over each sequence's pending and K drafted tokens."""

    logits: List[torch.Tensor]
    span: Span


class VerifiedBatch(NamedTuple):
    """The outcome of each sequence, and when the target was at work on it."""

    outcomes: list[Verification]
    span: Span


class Verifier:
    """Owns the target's cache."""

    def __init__(self, target: LanguageModel, cache: KVCache) -> None:
        self.target = target
        self.cache = cache

    def prefill(self, sequence: Sequence) -> None:
        """Caches all of the prompt but the pending token."""
        self.target.prefill(self.cache, sequence.slot, sequence.tokens[:-1])

    def verify(self, sequences: List[Sequence], drafts: List[Draft]) -> VerifiedBatch:
        """Judges one draft, possibly empty, for each sequence; settles the accepted tokens' cache.

        Raises:
            NonFiniteLogitsError: names the sequence and the position in its output.
        """
        start_ns = time.perf_counter_ns()
        outcomes, judging = self.judge(sequences, drafts, self._pass(sequences, drafts))
        return VerifiedBatch(outcomes, judging._replace(start_ns=start_ns))

    def score(self, sequences: List[Sequence], drafts: List[Draft]) -> Scored:
        """The target's pass over each sequence's pending token and draft, possibly empty."""
        start_ns = time.perf_counter_ns()
        logits = self._pass(sequences, drafts)
        wait_for(self.target.device)
        return Scored(logits, Span(SpanKind.VERIFY, start_ns, time.perf_counter_ns()))

    def judge(
        self, sequences: List[Sequence], drafts: List[Draft], logits: List[torch.Tensor]
    ) -> VerifiedBatch:
        """Judges the drafts that were scored, each with up to one more token drafted since.

        Raises:
            NonFiniteLogitsError: names the sequence and the position in its output.
        """
        start_ns = time.perf_counter_ns()
        cases = [_case(*each) for each in zip(sequences, drafts, logits, strict=True)]
        concludes = verifications(cases, together=self.target.device.type != "cpu")
        outcomes = [self._settle(*each) for each in zip(sequences, concludes, strict=True)]
        return VerifiedBatch(outcomes, Span(SpanKind.VERIFY, start_ns, time.perf_counter_ns()))

    def _pass(self, sequences: List[Sequence], drafts: List[Draft]) -> List[torch.Tensor]:
        """Logits of each sequence; on a GPU they may still be in the making."""
        batch = _lay_out(sequences, drafts)
        counts = [segment.count for segment in batch.segments]
        return torch.split(self.target.forward(batch, self.cache), counts)

    def _settle(self, sequence: Sequence, conclude: Callable[[], Verification]) -> Verification:
        try:
            outcome = conclude()
        except NonFiniteLogitsError as error:
            name, position = sequence.request.request_id, sequence.output_length
            raise NonFiniteLogitsError(
                f"request {name}, output position {position}: target {error}"
            ) from error
        first = len(sequence.tokens)  # cell of the first drafted token, behind the pending one
        self.cache.truncate(sequence.slot, first)
        self.cache.gather(sequence.slot, [first + node for node in outcome.nodes])
        return outcome


def _case(sequence: Sequence, draft: Draft, logits: torch.Tensor) -> Case:
    position, params = sequence.output_length, sequence.request.sampling
    count, greedy = len(draft.tokens) + 1, params.temperature == 0
    uniforms = () if greedy else sequence.stream.uniforms(Role.VERIFY, position, count)
    return Case(logits, draft, params, uniforms)


def _lay_out(sequences: List[Sequence], drafts: List[Draft]) -> TokenBatch:
    """Each sequence's pending token and behind it its drafted ones, in the draft's order."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        start, count = len(sequence.tokens) - 1, len(draft.tokens) + 1
        tokens += [sequence.tokens[-1], *draft.tokens.tolist()]
        if isinstance(draft, TreeDraft):
            tree = _as_tree(sequence, draft)
            positions += tree.positions(0)
            segments.append(Segment(sequence.slot, start, count, tree.mask(0)))
        else:
            positions += range(start, start + count)
            segments.append(Segment(sequence.slot, start, count))
    return TokenBatch.pack(tokens, positions, segments)


def _as_tree(sequence: Sequence, draft: TreeDraft) -> TokenTree:
    """The pending token as node 0 and drafted token i as node i + 1."""
    tree = TokenTree(len(sequence.tokens) - 1, len(draft.tokens) + 1)
    pending = tree.add(sequence.tokens[-1])
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        tree.add(token, pending + 1 + parent)
    return tree
