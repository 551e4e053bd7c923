"""AR: plain autoregressive decoding, one token a round. The baseline of every speedup."""

from __future__ import annotations

import torch

from harness.decoder import DecoderSetup, Round
from impl.engine.engine_decoder import EngineDecoder, settle
from impl.engine.sampling import Draft

NOTHING_DRAFTED = Draft(torch.empty(0, dtype=torch.int64))


class AutoregressiveDecoder(EngineDecoder):
    """Verifies an empty draft: all that is left of speculative decoding is its bonus token."""

    name = "ar"

    @classmethod
    def create(cls, setup: DecoderSetup) -> AutoregressiveDecoder:
        """See `Decoder.create`."""
        return cls(setup)

    def step(self) -> list[Round]:
        """Emits one token for each live sequence."""
        live = self.slots.live()
        outcomes, span = self.verifier.verify(live, [NOTHING_DRAFTED] * len(live))
        return [
            settle(sequence, NOTHING_DRAFTED, outcome, [span])
            for sequence, outcome in zip(live, outcomes, strict=True)
        ]
