"""Verification where logits are on a GPU: all that a decision can need is read in one transfer.

`sampling.verify` looks at one row after the other, and each look would wait for the GPU. Here the
GPU computes, for every row, what is compared and the token that a rejection there would emit; the
rule that decides, on the host, is `sampling`'s own. The outcome is that of `sampling.verify` for
the same logits and uniforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decoder import SamplingParams
from impl.engine.device import upload
from impl.engine.sampling import (
    Draft,
    TreeDraft,
    Uniforms,
    Verification,
    accepts,
    best_columns,
    largest,
    not_finite,
    sample,
    softened,
    verify,
    verify_greedy,
    without_bonus,
)
from impl.engine.truncation import truncated

Numbers = Sequence[Sequence[float]]


class Case(NamedTuple):
    """The arguments of `sampling.verify` for one sequence."""

    logits: Tensor
    draft: Draft
    params: SamplingParams
    uniforms: Uniforms


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A verification whose numbers are being computed.

    Attributes:
        numbers: float64 [columns, rows] on the device. At temperature 0: each row's argmax and
            whether the row is finite; else p and q of its drafted token, the token emitted when
            that is rejected (or when there is none), and whether it is finite. Ids are exact.
        case: what is judged.
    """

    numbers: Tensor
    case: Case

    def conclude(self, numbers: Numbers) -> Verification:
        """The outcome. Raises `NonFiniteLogitsError` for a row that was looked at."""
        _, draft, params, uniforms = self.case
        if params.temperature == 0:
            best, finite = numbers
            _check(finite, range(len(finite)))
            return verify_greedy([int(token) for token in best], draft)
        p, q, emitted, finite = numbers
        for row in range(len(p)):
            _check(finite, [row])
            drafted = row < len(draft.tokens)
            if not (drafted and accepts(float(uniforms[row]), p[row], q[row])):
                return Verification(row, int(emitted[row]))
        return without_bonus(draft)


def verifications(cases: Sequence[Case], *, together: bool) -> list[Callable[[], Verification]]:
    """What gives each outcome, or raises `NonFiniteLogitsError`.

    Args:
        cases: one for each sequence.
        together: read once for all of them, as a GPU wants it; else row by row, as a CPU does.
    """
    if not together:
        return [partial(verify, *case) for case in cases]
    begun = {i: begin(case) for i, case in enumerate(cases) if in_one_transfer(case)}
    numbers = dict(zip(begun, read(list(begun.values())), strict=True))
    return [
        partial(begun[i].conclude, numbers[i]) if i in begun else partial(verify, *case)
        for i, case in enumerate(cases)
    ]


def in_one_transfer(case: Case) -> bool:
    """Whether `begin` takes it: what follows a tree's siblings hangs on their rejection."""
    return case.params.temperature == 0 or not isinstance(case.draft, TreeDraft)


def begin(case: Case) -> Begun:
    """Lets the device compute all that the outcome can need."""
    logits, draft, params, uniforms = case
    if params.temperature == 0:
        best = best_columns(logits)
        columns: tuple[Tensor, ...] = (best, largest(logits, best).isfinite())
    else:
        probs = softened(logits, params.temperature)
        finite = probs[:, 0].isfinite()
        columns = (*_compared(truncated(probs, params), draft, float(uniforms[-1])), finite)
    return Begun(torch.stack([column.double() for column in columns]), case)


def read(begun: Sequence[Begun]) -> list[Numbers]:
    """The numbers of all, in one transfer."""
    if not begun:
        return []
    values = torch.cat([one.numbers.reshape(-1) for one in begun]).cpu()
    parts = torch.split(values, [one.numbers.numel() for one in begun])
    return [part.view(one.numbers.shape).tolist() for one, part in zip(begun, parts, strict=True)]


def _compared(p: Tensor, draft: Draft, emission: float) -> tuple[Tensor, Tensor, Tensor]:
    """P and q of each row's drafted token, and what the row emits if that is rejected; [rows] each.

    Args:
        p: [rows, V]; rows beyond the drafted tokens have none.
        draft: a chain.
        emission: the uniform that draws the emitted token.
    """
    tokens = upload(draft.tokens[: len(p)], p.device)
    count, vocabulary = len(tokens), p.shape[1]
    at = torch.arange(count, device=p.device)
    known = tokens < vocabulary  # a padded draft may propose an id that the target lacks
    column = tokens.clamp(max=vocabulary - 1)
    p_token = p[at, column].where(known, 0)
    q_token = torch.ones_like(p_token)
    left = p.clone()
    drawn = 0
    if draft.probs is not None:
        q = upload(draft.probs[:count], p.device)
        drawn = len(q)
        q_token[:drawn] = _subtract(left[:drawn], q, draft.ids, tokens[:drawn])
    fixed = at[drawn:]  # point masses leave p without the token
    left[fixed, column[drawn:]] = left[fixed, column[drawn:]].where(~known[drawn:], 0)
    left = torch.where(left.any(-1, keepdim=True), left, p)
    uniforms = torch.full((len(p),), emission, dtype=torch.float64, device=p.device)
    rest = p.new_zeros(len(p) - count)
    return torch.cat((p_token, rest)), torch.cat((q_token, rest)), sample(left, uniforms)


def _subtract(left: Tensor, q: Tensor, ids: Tensor | None, tokens: Tensor) -> Tensor:
    """Makes `left` max(p - q, 0), in place; gives q [rows] of the tokens. See `sampling.residual`.

    Args:
        left: [rows, V], p.
        q: [rows, Vd].
        ids: int64 [Vd], target ids of its columns; None when they are the same.
        tokens: int64 [rows], target ids.
    """
    ids = None if ids is None else upload(ids, q.device)
    if ids is None:
        common = min(left.shape[1], q.shape[1])
        left[:, :common] -= q[:, :common].to(left)
    else:
        left.index_add_(1, ids, q.to(left), alpha=-1)
    left.clamp_(min=0)
    columns = torch.arange(q.shape[1], device=q.device) if ids is None else ids
    return q.where(columns == tokens[:, None], 0).sum(-1).to(left)


def _check(finite: Sequence[float], rows: Sequence[int]) -> None:
    for row in rows:
        if not finite[row]:
            raise not_finite(row, len(finite))
