"""A decoder with a slowdown in its verification, for tests: SD, and a sleep on top.

`step_ms` stretches every step to at least that long, so that what is planted shows on a machine
whose own speed varies; `slowdown` then sleeps that share of the step, in verification.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List

from pydantic import Field

from baselines.sd import SpeculativeDecoder, SpeculativeOptions
from harness.decoder import DecoderSetup, Round, Span
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence
from impl.engine.verifier import VerifiedBatch, Verifier


class PlantedOptions(SpeculativeOptions):
    step_ms: float = Field(0.0, ge=0)
    slowdown: float = Field(0.0, ge=0)


class _Slowed(Verifier):
    begin_ns: int  # of the step
    options: PlantedOptions

    def verify(self, sequences: List[Sequence], drafts: List[Draft]) -> VerifiedBatch:
        outcomes, span = super().verify(sequences, drafts)
        spent_ns = time.perf_counter_ns() - self.begin_ns
        step_ns = max(spent_ns, self.options.step_ms * 1e6) * (1 + self.options.slowdown)
        time.sleep(max(0.0, self.begin_ns + step_ns - time.perf_counter_ns()) / 1e9)
        return VerifiedBatch(outcomes, Span(span.kind, span.start_ns, time.perf_counter_ns()))


class PlantedDecoder(SpeculativeDecoder):
    name = "planted"
    Options = PlantedOptions

    def __init__(self, setup: DecoderSetup, options: PlantedOptions) -> None:
        super().__init__(setup, options)
        self.verifier.__class__ = _Slowed
        self.verifier.options = options  # type: ignore[attr-defined]

    @classmethod
    def create(cls, setup: DecoderSetup) -> PlantedDecoder:
        return cls(setup, PlantedOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        self.verifier.begin_ns = time.perf_counter_ns()  # type: ignore[attr-defined]
        return super().step()
