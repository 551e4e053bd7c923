"""A model whose passes take as long as those of another on other hardware (`--devices`).

The logits are the small model's own. A pass that is done early sleeps until its time is over, so
that the decoder, its processes and its messages run as they would beside slow passes, and no core
is burnt. Prefill keeps its own time.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.model_wrapper import ModelWrapper
from impl.engine.token_batch import TokenBatch

_SPUN_S = 2e-4  # before the end, where a sleep is too coarse


class Latency(NamedTuple):
    """Seconds of a pass by its new tokens, ascending, linear between; constant outside."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, tokens: int) -> float:
        """Seconds of a pass over so many new tokens."""
        return float(np.interp(tokens, self.tokens, self.seconds))


class EmulatedModel(ModelWrapper):
    """See the module docstring."""

    def __init__(self, model: LanguageModel, latency: Latency) -> None:
        super().__init__(model)
        self._latency = latency

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel`; returns when the pass's time is over."""
        end = time.perf_counter() + self._latency.of(len(batch.tokens))
        logits = self.model.forward(batch, cache, rows)
        if (left := end - time.perf_counter() - _SPUN_S) > 0:
            time.sleep(left)
        while time.perf_counter() < end:
            pass
        return logits
