"""The target's half of every method: a pass over pending and drafted tokens, then accept/reject."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from typing import NamedTuple

import torch

from harness.decoder import Span, SpanKind
from harness.errors import NonFiniteLogitsError
from impl.engine.kv_cache import KVCache
from impl.engine.randomness import Role
from impl.engine.sampling import Draft, Verification, verify
from impl.engine.sequence import Sequence
from impl.engine.token_batch import TokenBatch
from impl.engine.transformer import Transformer


class VerifiedBatch(NamedTuple):
    """The outcome of each sequence, and when the pass ran."""

    outcomes: list[Verification]
    span: Span


class Verifier:
    """Owns the target's cache."""

    def __init__(self, target: Transformer, cache: KVCache) -> None:
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
        parts = [
            (s.slot, len(s.tokens) - 1, [s.tokens[-1], *draft.tokens.tolist()])
            for s, draft in zip(sequences, drafts, strict=True)
        ]
        batch = TokenBatch.causal(parts, self.target.device)
        logits = torch.split(self.target.forward(batch, self.cache), [len(p[2]) for p in parts])
        outcomes = [self._judge(*case) for case in zip(sequences, drafts, logits, strict=True)]
        return VerifiedBatch(outcomes, Span(SpanKind.VERIFY, start_ns, time.perf_counter_ns()))

    def _judge(self, sequence: Sequence, draft: Draft, logits: torch.Tensor) -> Verification:
        position = sequence.output_length
        uniforms = sequence.stream.uniforms(Role.VERIFY, position, len(logits))
        try:
            outcome = verify(logits, draft, sequence.request.sampling, uniforms)
        except NonFiniteLogitsError as error:
            name = sequence.request.request_id
            raise NonFiniteLogitsError(
                f"request {name}, output position {position}: target {error}"
            ) from error
        self.cache.truncate(sequence.slot, len(sequence.tokens) + outcome.accepted)
        return outcome
