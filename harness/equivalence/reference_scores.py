"""Finished outputs teacher-forced through a clean reference, reduced to one row of numbers a token.

The reference gives, for every prefix of an output, the logits of the next token; the distribution p
that the method should have drawn from follows from them (temperature, top-k, top-p). Of p only what
the tests need is kept, never a row of the vocabulary's size. Which draft tokens, rounds or caches
led to the output plays no part here: an output is judged by its token ids alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from harness.decoder import SamplingParams
from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.sampling import probabilities
from impl.engine.token_batch import TokenBatch

TokenIds = Sequence[int]
Columns = dict[str, NDArray[Any]]

DRAFT_TOPS = (1, 3)  # F: sizes of the sets of the draft's favourites
LEAST_LOG_P = -20.7  # log 1e-9: log p is cut off there, so that no single token decides a sum
_CHUNK_VALUES = 2**23  # logits of one pass: 32 MB in float32
_REDUCED_VALUES = 2**20  # probabilities reduced at once: few enough to stay in a CPU's cache


class LogitSource(Protocol):
    """A model that scores given texts.

    Attributes:
        exact: whether these are the very logits that the decoders saw; else they are near.
    """

    exact: bool

    def chunks(self, prompt_ids: TokenIds, output_ids: TokenIds) -> Iterator[torch.Tensor]:
        """Logits [n, V] of successive output positions, all in order, n at the source's choice.

        Column j is token id j.
        """


@dataclass(frozen=True, slots=True)
class References:
    """What outputs are judged against: the target, and the draft for the sets it favours."""

    target: LogitSource
    draft: LogitSource | None = None


class EngineLogits:
    """Our engine with a cache of its own; a prompt is prefilled once for all its outputs."""

    def __init__(self, model: LanguageModel, *, exact: bool | None = None) -> None:
        """Wraps a model.

        Args:
            model: target or draft.
            exact: see `LogitSource`; by default, whether the model's operators give a row the
                same result in every batch.
        """
        self.exact = model.batch_invariant if exact is None else exact
        self._model = model
        self._cache: KVCache | None = None
        self._context: tuple[int, ...] = ()

    def chunks(self, prompt_ids: TokenIds, output_ids: TokenIds) -> Iterator[torch.Tensor]:
        """See `LogitSource.chunks`."""
        fed = [prompt_ids[-1], *output_ids[:-1]]
        cache = self._prefilled(tuple(prompt_ids[:-1]), len(fed))
        size = max(1, _CHUNK_VALUES // self._model.vocabulary)
        for first in range(0, len(fed), size):
            parts = [(0, len(prompt_ids) - 1 + first, fed[first : first + size])]
            logits = self._model.forward(TokenBatch.causal(parts), cache)
            yield self._by_token_id(logits)

    def _prefilled(self, context: tuple[int, ...], room: int) -> KVCache:
        need = len(context) + room
        if self._cache is None or self._cache.cells < need:
            self._cache = self._model.new_cache(1, 2 * need)
        elif context == self._context:
            return self._cache
        self._model.prefill(self._cache, 0, context)
        self._context = context
        return self._cache

    def _by_token_id(self, logits: torch.Tensor) -> torch.Tensor:
        """Undoes a trimmed head: tokens without a logit get -inf."""
        ids = self._model.head_ids
        if ids is None:
            return logits
        full = logits.new_full((len(logits), int(ids.max()) + 1), -torch.inf)
        return full.index_copy_(1, ids.to(logits.device), logits)


class TransformersLogits:
    """The Hugging Face model in float32: another implementation, so its logits differ by rounding.

    One pass over prompt and output, with the output head on a few rows at a time.
    """

    exact = False

    def __init__(self, folder: Path) -> None:
        """Loads the model. Raises `OSError` for a folder that transformers cannot read."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        self._body, self._head = model.base_model.eval(), model.get_output_embeddings()

    @torch.inference_mode()
    def chunks(self, prompt_ids: TokenIds, output_ids: TokenIds) -> Iterator[torch.Tensor]:
        """See `LogitSource.chunks`."""
        fed = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        hidden = self._body(fed, use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 :]
        size = max(1, _CHUNK_VALUES // self._head.out_features)
        for rows in torch.split(hidden, size):
            yield self._head(rows)


def score_output(
    references: References,
    prompt_ids: TokenIds,
    output_ids: TokenIds,
    params: SamplingParams,
    end_ids: TokenIds = (),
) -> Columns:
    """The columns of `reduce_rows` for every token of one output."""
    draft = references.draft
    favourites = None if draft is None else draft_favourites(draft, prompt_ids, output_ids)
    parts, first = [], 0
    for logits in references.target.chunks(prompt_ids, output_ids):
        for few in torch.split(logits, max(1, _REDUCED_VALUES // logits.shape[-1])):
            rows = slice(first, first + len(few))
            p = probabilities(few, params)
            tokens = torch.tensor(output_ids[rows], device=p.device)
            liked = None if favourites is None else favourites[rows]
            parts.append(reduce_rows(p, tokens, liked, end_ids))
            first = rows.stop
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def draft_favourites(
    draft: LogitSource, prompt_ids: TokenIds, output_ids: TokenIds
) -> torch.Tensor:
    """The draft's most likely tokens behind each prefix, best first: int64 [n, max F]."""
    most = max(DRAFT_TOPS)
    return torch.cat([c.topk(most).indices for c in draft.chunks(prompt_ids, output_ids)])


def reduce_rows(
    p: torch.Tensor,
    tokens: torch.Tensor,
    favourites: torch.Tensor | None,
    end_ids: TokenIds = (),
) -> Columns:
    """What the tests need to know of each token and its distribution.

    Args:
        p: [n, V], what token i should have been drawn from.
        tokens: int64 [n], what was emitted. An id outside V has probability 0.
        favourites: int64 [n, >= max F], the draft's favourites, best first; None without a draft.
        end_ids: tokens that end a sequence.

    Returns:
        Columns [n]. `p_token`; `p_above` and `p_tail`, the mass of the tokens ranked above it and
        of those from it on; `p_lower_ids`, the mass of the tokens with lower ids; `log_p` of the
        token, `log_p_mean`, `log_p_variance` and `log_p_third`, mean and central moments of log p
        under p, cut off at `LEAST_LOG_P`; `argmax_p` and `is_argmax`; `end_p` and `is_end`;
        `draft_top{F}_p` and `in_draft_top{F}` for each F of `DRAFT_TOPS`.
    """
    vocabulary = p.shape[-1]
    inside = tokens < vocabulary
    column = tokens.clamp(max=vocabulary - 1)[:, None]
    p_token = torch.where(inside, p.gather(-1, column)[:, 0], 0)
    best = p.argmax(-1)
    ids = torch.arange(vocabulary, device=p.device)
    lower = ids < tokens[:, None]
    above = (p > p_token[:, None]) | ((p == p_token[:, None]) & lower)
    ends = torch.tensor([i for i in end_ids if i < vocabulary], dtype=torch.int64, device=p.device)
    found = {
        "p_token": p_token,
        "p_above": _sum(p.where(above, 0)),
        "p_tail": _sum(p.masked_fill(above, 0)),
        "p_lower_ids": _sum(p.where(lower, 0)),
        **_log_p_moments(p, p_token),
        "argmax_p": p.gather(-1, best[:, None])[:, 0],
        "is_argmax": tokens == best,
        "end_p": _sum(p[:, ends]),
        "is_end": torch.isin(tokens, ends),
        **_favourite_columns(p, tokens, favourites),
    }
    return {name: values.cpu().numpy().astype(_dtype(values)) for name, values in found.items()}


def _dtype(values: torch.Tensor) -> type:
    return np.bool_ if values.dtype == torch.bool else np.float64


def _sum(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(-1, dtype=torch.float64)


def _log_p_moments(p: torch.Tensor, p_token: torch.Tensor) -> dict[str, torch.Tensor]:
    log_p = p.log().clamp_(min=LEAST_LOG_P)
    mean = _sum(p * log_p)
    deviation = log_p.sub_(mean[:, None].to(p))
    weighted = p * deviation
    return {
        "log_p": p_token.double().log().clamp(min=LEAST_LOG_P),
        "log_p_mean": mean,
        "log_p_variance": _sum(weighted.mul_(deviation)),
        "log_p_third": _sum(weighted.mul_(deviation)),
    }


def _favourite_columns(
    p: torch.Tensor, tokens: torch.Tensor, favourites: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    if favourites is None:
        return {}
    found = {}
    for size in DRAFT_TOPS:
        top = favourites[:, :size].to(p.device)
        known = top < p.shape[-1]  # a padded draft may favour an id that the target lacks
        mass = p.gather(-1, top.clamp(max=p.shape[-1] - 1)) * known
        found[f"draft_top{size}_p"] = _sum(mass)
        found[f"in_draft_top{size}"] = (top == tokens[:, None]).any(-1)
    return found
