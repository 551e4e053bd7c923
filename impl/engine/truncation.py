"""Top-k and top-p: which tokens of a distribution are kept.

On a CPU the likely tokens are looked for, which beats sorting a vocabulary by far; on other devices
all are sorted, since looking would wait for the device at every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.decoder import SamplingParams

_FIRST_NUCLEUS = 128  # tokens ranked at first when looking for the top-p set
_NUCLEUS_GROWTH = 16


def truncated(probs: Tensor, params: SamplingParams) -> Tensor:
    """`probs` [..., V] cut to the top-k and then to the top-p of what is left, renormalised.

    May change `probs`; returns it as it is where nothing is cut.
    """
    top_k = 0 < params.top_k < probs.shape[-1]
    if not top_k and params.top_p >= 1:
        return probs
    if probs.device.type != "cpu":
        return cut_by_rank(probs, params)
    if top_k:
        ranked = probs.topk(params.top_k).values
        share = params.top_p if params.top_p < 1 else math.inf  # all k, however small the last
        return _keep_nucleus(probs, ranked, share * ranked.sum(-1, True, dtype=torch.float64))
    return _keep_nucleus(probs, *_rank_nucleus(probs, params.top_p))


def cut_by_rank(probs: Tensor, params: SamplingParams) -> Tensor:
    """`truncated` by a full sort, without waiting for the device."""
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    most = params.top_k if 0 < params.top_k < probs.shape[-1] else probs.shape[-1]
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept = rank < most
    if params.top_p < 1:
        mass = params.top_p * ranked[..., :most].sum(-1, True, dtype=torch.float64)
        short = (ranked.cumsum(-1, dtype=torch.float64) < mass).sum(-1, keepdim=True)
        kept = kept & (rank <= short)
    cut = torch.zeros_like(probs).scatter_(-1, ids, ranked.where(kept, 0))
    return cut.div_(cut.sum(-1, keepdim=True))


def _rank_nucleus(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The largest probabilities of each row, enough to hold the mass `top_p`, and that mass."""
    vocab = probs.shape[-1]
    mass = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    size = min(_FIRST_NUCLEUS, vocab)
    ranked = probs.topk(size).values  # not a full sort, which costs 30 ms at V = 152k
    while size < vocab and bool((ranked.sum(-1, keepdim=True, dtype=torch.float64) < mass).any()):
        size = min(size * _NUCLEUS_GROWTH, vocab)
        ranked = probs.topk(size).values
    return ranked, mass


def _keep_nucleus(probs: Tensor, ranked: Tensor, mass: Tensor) -> Tensor:
    """Keeps the fewest most likely tokens that hold `mass`, zeroes the others and renormalises.

    Args:
        probs: [..., V], changed in place.
        ranked: [..., n], each row's n largest values, descending; at most these are kept.
        mass: float64 [..., 1].
    """
    short = (ranked.cumsum(-1, dtype=torch.float64) < mass).sum(-1, keepdim=True)
    count = (short + 1).clamp_(max=ranked.shape[-1])
    threshold = ranked.gather(-1, count - 1)
    kept = probs >= threshold
    if not torch.equal(kept.sum(-1, keepdim=True), count):  # a tie at the edge: lower ids stay
        above = probs > threshold
        equal = kept & ~above
        kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    probs.masked_fill_(~kept, 0)
    return probs.div_(probs.sum(-1, keepdim=True))
