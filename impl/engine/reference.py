"""The target with a cache of its own and no method's state: what outputs are judged against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.token_batch import TokenBatch


class Reference:
    """Teacher-forces token ids through the target. Costs a pass over the ids a call."""

    def __init__(
        self, target: Callable[[], LanguageModel], precise: Callable[[], LanguageModel]
    ) -> None:
        """Takes what loads the target, and in float32 where its rounding must be known.

        Neither is called before it is needed.
        """
        self._load_target = target
        self._load_precise = precise

    def token_gap(self, ids: Sequence[int], first: int, second: int) -> float:
        """|logit(first) - logit(second)| for the token that follows `ids`."""
        logits = self._one_pass(ids[:-1], ids[-1:])[-1]
        return abs(float(logits[first] - logits[second]))

    def rounding_noise(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
        """Largest change of a logit between scoring the output by single steps and in one pass."""
        fed = [prompt_ids[-1], *output_ids[:-1]]
        together = self._one_pass(prompt_ids[:-1], fed)
        cache, start = self._prefilled(prompt_ids[:-1], len(fed))
        noise = 0.0
        for i, token in enumerate(fed):
            batch = TokenBatch.causal([(0, start + i, [token])])
            alone = self._target.forward(batch, cache)[0]
            noise = max(noise, float((alone - together[i]).abs().max()))
        return noise

    def dtype_noise(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
        """Largest change of a logit between scoring the output in the run's dtype and float32."""
        fed = [prompt_ids[-1], *output_ids[:-1]]
        ours, exact = (scorer._one_pass(prompt_ids[:-1], fed) for scorer in (self, self._precise))
        return float((ours.float() - exact.float()).abs().max())

    @cached_property
    def _target(self) -> LanguageModel:
        return self._load_target()

    @cached_property
    def _precise(self) -> Reference:
        return Reference(self._load_precise, self._load_precise)

    def _one_pass(self, context: Sequence[int], fed: Sequence[int]) -> torch.Tensor:
        """Logits [fed, vocabulary] behind each of the `fed` tokens."""
        cache, start = self._prefilled(context, len(fed))
        batch = TokenBatch.causal([(0, start, list(fed))])
        return self._target.forward(batch, cache)

    def _prefilled(self, context: Sequence[int], room: int) -> tuple[KVCache, int]:
        cache = self._target.new_cache(1, len(context) + room)
        self._target.prefill(cache, 0, context)
        return cache, len(context)
