"""n-gram: prompt lookup decoding (Saxena 2023), drafts copied from the sequence's own text."""

from __future__ import annotations

import time
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator

from harness.decoder import DecoderOptions, DecoderSetup, Round, Span, SpanKind, TuningGrid
from impl.engine.engine_decoder import EngineDecoder, settle
from impl.engine.ngram import LONGEST, NgramIndex
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence


class NgramOptions(DecoderOptions):
    """Parameters of prompt lookup."""

    tuning_grid: ClassVar[TuningGrid] = {"lookahead": (2, 4, 6, 10), "min_match": (1, 2, 3)}

    lookahead: int = Field(6, ge=1, le=64, description="draft tokens a round (K)")
    max_match: int = Field(LONGEST, ge=1, description="longest n-gram looked for, tried first")
    min_match: int = Field(1, ge=1, description="shortest n-gram worth a draft")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match: must be at most max_match, {self.max_match}")
        return self


class NgramDecoder(EngineDecoder):
    """Drafts what followed the last few tokens before; without a match the round is one of AR.

    A copied token is a point mass, so at any temperature it is accepted with the target's own
    probability of it.
    """

    name = "ngram"
    Options = NgramOptions
    takes_synthetic = False

    def __init__(self, setup: DecoderSetup, options: NgramOptions) -> None:
        super().__init__(setup)
        self.options = options
        self.indices: dict[str, NgramIndex] = {}  # by request id

    @classmethod
    def create(cls, setup: DecoderSetup) -> NgramDecoder:
        """See `Decoder.create`."""
        return cls(setup, NgramOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """Looks up a draft for each live sequence, verifies them all in one target pass."""
        live = self.slots.live()
        start_ns = time.perf_counter_ns()
        drafts = [self._look_up(sequence) for sequence in live]
        drafting = Span(SpanKind.DRAFT, start_ns, time.perf_counter_ns())
        outcomes, verifying = self.verifier.verify(live, drafts)
        return [
            settle(sequence, draft, outcome, [drafting, verifying])
            for sequence, draft, outcome in zip(live, drafts, outcomes, strict=True)
        ]

    def _look_up(self, sequence: Sequence) -> Draft:
        index = self.indices[sequence.request.request_id]
        found = index.continuation(sequence.draft_limit(self.options.lookahead))
        return Draft(torch.tensor(found, dtype=torch.int64))

    def _prefill(self, sequence: Sequence) -> None:
        super()._prefill(sequence)
        self.indices[sequence.request.request_id] = NgramIndex(
            sequence.tokens, self.options.min_match, self.options.max_match
        )

    def _forget(self, sequence: Sequence) -> None:
        del self.indices[sequence.request.request_id]
