"""Saguaro sampling: drafting so that the outcome of a rejection is easier to guess."""

from __future__ import annotations

import torch
from torch import Tensor


def reweight(q: Tensor, top: int, c: float) -> Tensor:
    """Multiplies the `top` most likely tokens of q by C and renormalises (DESIGN section 4).

    Less mass of q' on the tokens that the speculation cache guesses leaves more residual
    max(p - q', 0) on them, so t* is found in the cache more often, at some cost in acceptance.
    Tokens must be drawn from q', and q' is what verification must see: then the output is exact at
    any C.

    Args:
        q: [..., V], the draft's distribution; not changed.
        top: F, the size of the guessed set; 0 changes nothing.
        c: C in [0, 1]; 1 is plain sampling.

    Returns:
        [..., V], each row a distribution. q itself at C = 1. A row with all its mass on its top
        tokens has no q' at C = 0 and stays q.
    """
    if c == 1 or top == 0:
        return q
    values, columns = q.topk(min(top, q.shape[-1]))
    lowered = q.scatter(-1, columns, values * c)
    total = lowered.sum(-1, keepdim=True)
    return torch.where(total > 0, lowered / total, q)
