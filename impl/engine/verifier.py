"""The target's half of every method: a pass over pending and drafted tokens, then accept/reject."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from typing import NamedTuple

import torch

from harness.decoder import Span, SpanKind
from harness.errors import NonFiniteLogitsError
from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.randomness import Role
from impl.engine.sampling import Draft, TreeDraft, Verification, verify
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
        logits, passing = self.score(sequences, drafts)
        outcomes, judging = self.judge(sequences, drafts, logits)
        return VerifiedBatch(outcomes, passing._replace(end_ns=judging.end_ns))

    def score(self, sequences: List[Sequence], drafts: List[Draft]) -> Scored:
        """The target's pass over each sequence's pending token and draft, possibly empty."""
        start_ns = time.perf_counter_ns()
        batch = _lay_out(sequences, drafts, self.target.device)
        counts = [segment.count for segment in batch.segments]
        logits = torch.split(self.target.forward(batch, self.cache), counts)
        return Scored(logits, Span(SpanKind.VERIFY, start_ns, time.perf_counter_ns()))

    def judge(
        self, sequences: List[Sequence], drafts: List[Draft], logits: List[torch.Tensor]
    ) -> VerifiedBatch:
        """Judges the drafts that were scored, each with up to one more token drafted since.

        Raises:
            NonFiniteLogitsError: names the sequence and the position in its output.
        """
        start_ns = time.perf_counter_ns()
        outcomes = [self._judge(*case) for case in zip(sequences, drafts, logits, strict=True)]
        return VerifiedBatch(outcomes, Span(SpanKind.VERIFY, start_ns, time.perf_counter_ns()))

    def _judge(self, sequence: Sequence, draft: Draft, logits: torch.Tensor) -> Verification:
        position, params = sequence.output_length, sequence.request.sampling
        count, greedy = len(draft.tokens) + 1, params.temperature == 0
        uniforms = () if greedy else sequence.stream.uniforms(Role.VERIFY, position, count)
        try:
            outcome = verify(logits, draft, params, uniforms)
        except NonFiniteLogitsError as error:
            name = sequence.request.request_id
            raise NonFiniteLogitsError(
                f"request {name}, output position {position}: target {error}"
            ) from error
        first = len(sequence.tokens)  # cell of the first drafted token, behind the pending one
        self.cache.truncate(sequence.slot, first)
        self.cache.gather(sequence.slot, [first + node for node in outcome.nodes])
        return outcome


def _lay_out(sequences: List[Sequence], drafts: List[Draft], device: torch.device) -> TokenBatch:
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
    return TokenBatch.pack(tokens, positions, segments, device)


def _as_tree(sequence: Sequence, draft: TreeDraft) -> TokenTree:
    """The pending token as node 0 and drafted token i as node i + 1."""
    tree = TokenTree(len(sequence.tokens) - 1, len(draft.tokens) + 1)
    pending = tree.add(sequence.tokens[-1])
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        tree.add(token, pending + 1 + parent)
    return tree
