"""SD: speculative decoding (Leviathan et al. 2023; Chen et al. 2023), draft then verify."""

from __future__ import annotations

import time
from typing import ClassVar

from pydantic import Field

from harness.decoder import DecoderOptions, DecoderSetup, Round, Span, SpanKind, TuningGrid
from impl.engine.drafter import Drafter
from impl.engine.engine_decoder import EngineDecoder, settle
from impl.engine.sequence import Sequence


class SpeculativeOptions(DecoderOptions):
    """Parameters of SD."""

    tuning_grid: ClassVar[TuningGrid] = {
        "lookahead": (1, 2, 3, 4, 5, 6, 8),
        "stop_below": (0.0, 0.4),
    }

    lookahead: int = Field(4, ge=1, le=64, description="draft tokens a round (K), at most")
    stop_below: float = Field(
        0.0, ge=0, le=1, description="drafting stops behind a token less likely than this; 0: never"
    )


class SpeculativeDecoder(EngineDecoder):
    """Draft and target take turns on the target's device.

    `stop_below` is the assistant_confidence_threshold of transformers and the p-min of llama.cpp;
    the unlikely token itself is submitted, which keeps sampled output exact (`drafter.stops`).
    """

    name = "sd"
    Options = SpeculativeOptions
    needs_draft = True

    def __init__(self, setup: DecoderSetup, options: SpeculativeOptions) -> None:
        super().__init__(setup)
        self.options = options
        self.drafter = Drafter(setup.models.draft(), setup.batch_size, setup.max_context)

    @classmethod
    def create(cls, setup: DecoderSetup) -> SpeculativeDecoder:
        """See `Decoder.create`."""
        return cls(setup, SpeculativeOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """Drafts up to K tokens for each live sequence, verifies them all in one target pass."""
        live = self.slots.live()
        start_ns = time.perf_counter_ns()
        drafts = self.drafter.propose(live, self.options.lookahead, self.options.stop_below)
        drafting = Span(SpanKind.DRAFT, start_ns, time.perf_counter_ns())
        outcomes, verifying = self.verifier.verify(live, drafts)
        return [
            settle(sequence, draft, outcome, [drafting, verifying])
            for sequence, draft, outcome in zip(live, drafts, outcomes, strict=True)
        ]

    def _prefill(self, sequence: Sequence) -> None:
        super()._prefill(sequence)
        self.drafter.prefill(sequence)
