"""From logits to tokens: temperature, top-k, top-p, inverse-CDF draws and speculative verification.

The one implementation of all of these; every method calls it. Randomness comes in as explicit
uniforms, so each function is pure. Knows nothing of models, caches or where a draft came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.decoder import SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine.token_tree import ROOT
from impl.engine.truncation import truncated

Uniforms = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """K proposed tokens, each behind the one before, and the distributions they were drawn from.

    Attributes:
        tokens: int64 [K], target ids, each drawn from its q (or fixed, for a point mass). A draft
            padded beyond the target's vocabulary may propose an id outside it: it is rejected.
        probs: float [M, Vd], M <= K: row i is q of token i, after temperature, top-p, reweighting
            and trimming. Tokens beyond the rows, all of them when this is None, are point masses
            (greedy draft, n-gram continuation, filler).
        ids: int64 [Vd], the distinct target ids of q's columns (a trimmed vocabulary); None when
            column j is target id j. Then Vd may differ from V by padding: the common part counts.
    """

    tokens: Tensor
    probs: Tensor | None = None
    ids: Tensor | None = None

    def row(self, index: int) -> Tensor | None:
        """The distribution of token `index`, [Vd], or None for a point mass."""
        return self.probs[index] if self.probs is not None and index < len(self.probs) else None

    def mass(self, index: int) -> float:
        """The probability with which token `index` was drawn; 1 for a point mass."""
        return _draft_mass(self.row(index), self.ids, int(self.tokens[index]))

    def children(self, node: int) -> Sequence[int]:
        """Indices of the tokens proposed behind token `node` (ROOT: first), in order of trial."""
        return range(node + 1, min(node + 2, len(self.tokens)))


@dataclass(frozen=True, slots=True, eq=False)
class TreeDraft(Draft):
    """K proposed tokens that branch: siblings are rival candidates for one position.

    Siblings differ. They were drawn one after the other, in this order, from one q without
    replacement: each from q without its elder siblings, renormalised. Where there is no q they are
    point masses, chosen without looking at the random numbers of the verification.

    Attributes:
        parents: the token that each one follows, an earlier one, or ROOT.
        sources: the row of `probs` that each token was drawn from; unused without `probs`.
    """

    parents: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    def row(self, index: int) -> Tensor | None:
        """See `Draft.row`; siblings share the q before any of them was drawn."""
        return None if self.probs is None else self.probs[self.sources[index]]

    def children(self, node: int) -> Sequence[int]:
        """See `Draft.children`."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome (k, t*) of verifying a draft.

    Attributes:
        accepted: k, how many drafted tokens were accepted.
        token: t*, emitted after them: from the residual, or the bonus token behind a last one.
        path: indices of the accepted tokens of a tree; None for a chain, whose first k they are.
        token_drafted: t* is the draft's own last token, accepted in the bonus token's place; it is
            not counted in k.
    """

    accepted: int
    token: int
    path: tuple[int, ...] | None = None
    token_drafted: bool = False

    @property
    def nodes(self) -> Sequence[int]:
        """Indices of the accepted tokens in the draft, in order."""
        return range(self.accepted) if self.path is None else self.path


def argmax(logits: Tensor) -> Tensor:
    """Most likely token of each row, [..., V] -> int64 [...]; the lowest id on a tie.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf, or nothing but -inf.
    """
    best = best_columns(logits)
    _check_finite(largest(logits, best).reshape(-1))
    return best


def best_columns(logits: Tensor) -> Tensor:
    """`argmax` without a look at whether rows are sound, for which it would wait for a GPU."""
    rows = logits.reshape(-1, logits.shape[-1])
    best = _argmax_on_cpu(rows) if rows.device.type == "cpu" else rows.argmax(-1)
    return best.view(logits.shape[:-1])


def largest(logits: Tensor, best: Tensor) -> Tensor:
    """The largest logit of each row: NaN counts as largest, so it tells whether a row is sound."""
    return logits.gather(-1, best[..., None])[..., 0]


def _argmax_on_cpu(rows: Tensor) -> Tensor:
    # numpy's argmax is vectorised: 12x faster than torch's in float32, 40x from bfloat16.
    exact = rows if rows.dtype == torch.float64 else rows.float()
    return torch.from_numpy(exact.detach().numpy().argmax(-1)).view(-1)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that `params` draw from: temperature, then top-k, then top-p.

    Top-k keeps the k most likely tokens, top-p the smallest set of most likely tokens whose share
    of what top-k left reaches top_p (always one at least); between equal tokens the lower id comes
    first. Temperature 0 puts all mass on the argmax.

    Args:
        logits: [..., V], any float type; -inf masks a token.
        params: how to draw.

    Returns:
        [..., V]: float64 for float64 logits, else float32. Each row sums to 1.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf, or nothing but -inf.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if params.temperature == 0:
        one_hot = torch.zeros(logits.shape, dtype=dtype, device=logits.device)
        return one_hot.scatter_(-1, argmax(logits)[..., None], 1.0)
    probs = softened(logits, params.temperature)
    _check_finite(probs[..., 0].reshape(-1))
    return truncated(probs, params)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """The softmax at a temperature > 0; one bad logit makes its whole row NaN."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if temperature != 1:
        logits = logits.to(dtype) / temperature
    return torch.softmax(logits, -1, dtype=dtype)


def _check_finite(witness: Tensor) -> None:
    """Raises unless `witness` [rows], one value that is finite when its row is, is all finite."""
    finite = torch.isfinite(witness)
    if not finite.all():
        raise not_finite(int(finite.logical_not().nonzero()[0]), len(finite))


def not_finite(row: int, rows: int) -> NonFiniteLogitsError:
    """The error of a row that is not sound."""
    return NonFiniteLogitsError(
        f"logits: row {row} of {rows} holds NaN or infinity; check the model's weights and dtype"
    )


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one token from each row by inverting its cumulative distribution.

    Token j is drawn when u lies in [P(ids < j), P(ids <= j)); a token of probability 0 never is.

    Args:
        probs: [..., V], non-negative, each row with some mass; need not be normalised.
        uniforms: [...], float64 in [0, 1).

    Returns:
        int64 [...].
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    point = uniforms.to(total)[..., None] * total  # u <= 1 - 2^-53 cannot round up to the total
    return torch.searchsorted(cumulative, point, right=True)[..., 0]


def verify(
    logits: Tensor, draft: Draft, params: SamplingParams, uniforms: Uniforms
) -> Verification:
    """Accepts a path of a draft and emits one more token, distributed exactly as the target.

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): accept s_i with probability
    min(1, p_i(s_i) / q_i(s_i)); at the first rejection emit from norm(max(p_i - q_i, 0)); when all
    are accepted emit from p_{K+1}. At temperature 0 accept while s_i is the argmax of p_i.

    In a tree a rejected token's sibling is tried next (recursive rejection sampling without
    replacement: Jeon et al. 2024, arXiv 2402.14160; Yang et al. 2024, arXiv 2401.06706): p becomes
    norm(max(p - q, 0)), and q loses the rejected token and is renormalised. When no sibling is left
    the token is emitted from what is left of p. A chain is the tree without siblings.

    A chain may be one token longer than what the target was fed: its last token was drafted beside
    the pass. That token, judged as any other, takes the bonus token's place (as in PEARL, arXiv
    2408.11850): accepted it is t*, rejected t* comes from the residual.

    Args:
        logits: [K+1, V], the target's. Row 0 judges the first tokens, row i + 1 those behind
            token i; where the accepted path ends its row gives the bonus token. [K, V], K > 0, when
            the last token of a chain was not fed.
        draft: the K proposals; K = 0 is plain sampling.
        params: the target's sampling parameters.
        uniforms: K+1 independent numbers in [0, 1): one for each acceptance, the last for the
            emitted token. Unused at temperature 0.

    Returns:
        Which tokens were accepted, and the token emitted after them.

    Raises:
        NonFiniteLogitsError: a row that was looked at holds NaN or +inf, or nothing but -inf.
        ValueError: the number of rows or of uniforms does not fit the draft.
    """
    count = len(draft.tokens)
    if len(logits) not in (count + 1, max(1, count)):
        raise ValueError(f"logits: {len(logits)} rows for {count} drafted tokens, not K + 1")
    if params.temperature == 0:
        return verify_greedy(argmax(logits).tolist(), draft)
    if len(uniforms) != count + 1:
        raise ValueError(f"uniforms: {len(uniforms)} for {count} drafted tokens, not K + 1")
    path: list[int] = []
    while len(path) < len(logits):  # row by row: those off the path are never computed
        node = path[-1] if path else ROOT
        p = _row_probabilities(logits, node + 1, params)
        accepted, left = _try_children(p, draft, node, uniforms)
        if accepted is None:
            emission = torch.tensor(float(uniforms[-1]), dtype=torch.float64, device=left.device)
            return _outcome(draft, path, int(sample(left, emission)))
        path.append(accepted)
    return without_bonus(draft)


def verify_greedy(best: Sequence[int], draft: Draft) -> Verification:
    """`verify` at temperature 0, by the argmax of each row."""
    tokens: list[int] = draft.tokens.tolist()
    path: list[int] = []
    while len(path) < len(best):
        node = path[-1] if path else ROOT
        wanted = best[node + 1]
        accepted = next((c for c in draft.children(node) if tokens[c] == wanted), None)
        if accepted is None:
            return _outcome(draft, path, wanted)
        path.append(accepted)
    return without_bonus(draft)


def without_bonus(draft: Draft) -> Verification:
    """The whole chain was accepted, and no row of logits is left for another token."""
    return Verification(len(draft.tokens) - 1, int(draft.tokens[-1]), token_drafted=True)


def _outcome(draft: Draft, path: Sequence[int], token: int) -> Verification:
    return Verification(len(path), token, tuple(path) if isinstance(draft, TreeDraft) else None)


class _Trial(NamedTuple):
    """The child that was accepted, or None, and what is left of p [V] after the rejected ones."""

    accepted: int | None
    left: Tensor


def _try_children(p: Tensor, draft: Draft, node: int, uniforms: Uniforms) -> _Trial:
    """Judges the tokens behind `node` one after the other, until one is accepted."""
    q, rejected = None, None
    for child in draft.children(node):
        token = int(draft.tokens[child])
        if rejected is None:
            mass = draft.mass(child)
        else:  # p is normalised for a sibling's sake only, so a chain never needs it
            p, q = normalised(p), without(q, draft.ids, rejected)
            mass = _draft_mass(q, draft.ids, token)
        if accepts(float(uniforms[child]), _mass(p, None, token), mass):
            return _Trial(child, p)
        if rejected is None:
            q = draft.row(child)
        p, rejected = residual(p, q, draft.ids, token), token
    return _Trial(None, p)


def _row_probabilities(logits: Tensor, row: int, params: SamplingParams) -> Tensor:
    try:
        return probabilities(logits[row], params)
    except NonFiniteLogitsError:
        _check_finite(logits.amax(-1))  # names the row within the whole block
        raise


def accepts(uniform: float, p: float, q: float) -> bool:
    """Whether a token drawn with probability q is accepted: with probability min(1, p / q).

    Strict and without a division, so that u = 0 never accepts p = 0 and q = 0 needs no epsilon.
    """
    return uniform * q < p


def residual(p: Tensor, q: Tensor | None, ids: Tensor | None, token: int) -> Tensor:
    """What is left of p once q was tried and rejected: max(p - q, 0), not normalised.

    Args:
        p: [V], the target's distribution.
        q: [Vd], the distribution that `token` was drawn from; None for a point mass on it.
        ids: int64 [Vd], the target ids of q's columns; None when they are the same.
        token: the rejected token.

    Returns:
        [V]. Equal to p when nothing is left, which only rounding can bring about: exact arithmetic
        rejects with probability sum(max(p - q, 0)), so never when that is 0.
    """
    left = p.clone()
    if q is None:
        left[token : token + 1] = 0  # a slice: a padded draft's id may lie beyond V
    elif ids is None:
        common = min(len(p), len(q))
        left[:common] -= q[:common].to(p)
    else:
        left[ids.to(p.device)] -= q.to(p)
    left.clamp_(min=0)
    return left if bool(left.any()) else p


def normalised(weights: Tensor) -> Tensor:
    """`weights` [V] divided by their sum."""
    return weights / weights.sum(dtype=torch.float64).to(weights)


def without(q: Tensor | None, ids: Tensor | None, token: int) -> Tensor | None:
    """The distribution of the next sibling: q [Vd] without a rejected token, renormalised.

    Args:
        q: what `token` was drawn from; None for a point mass, whose siblings are point masses too.
        ids: int64 [Vd], the target ids of q's columns; None when they are the same.
        token: target id.
    """
    if q is None:
        return None
    left = q.clone()
    if ids is None:
        left[token] = 0
    else:
        left[ids == token] = 0
    return normalised(left)


def _draft_mass(q: Tensor | None, ids: Tensor | None, token: int) -> float:
    return 1.0 if q is None else _mass(q, ids, token)


def _mass(probs: Tensor, ids: Tensor | None, token: int) -> float:
    """Probability of a target id; 0 for one outside the vocabulary of `probs`."""
    if ids is not None:
        return float(probs[ids == token].sum())
    return float(probs[token]) if token < len(probs) else 0.0
