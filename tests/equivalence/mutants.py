"""Decoders broken on purpose: one small change each to a real SD, tree or SSD, as it is shipped.

A mutant replaces a function or a method of the real decoder for as long as it decodes; there is no
copy of any loop here. The certificate must reject every one (tests/equivalence/test_mutants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from tiny_runs import Setting, decode

from harness.decoder import CacheOutcome, SamplingParams
from harness.store import RunData
from impl.engine import device_verification, drafter, sampling, tree_drafter
from impl.engine.candidate_tree import CandidateTree, Siblings
from impl.engine.drafter import Proposal
from impl.engine.kv_cache import KVCache
from impl.engine.randomness import RandomStream, Role
from impl.engine.sampling import Draft, Verification, probabilities
from impl.engine.sequence import Sequence
from impl.engine.verifier import Verifier
from impl.ssd import speculator
from impl.ssd.decoder import SaguaroDecoder
from impl.ssd.speculation import SequenceSpeculation
from impl.ssd.speculator import Speculator

SD = Setting("sd")
SSD = Setting("ssd", options=(("lookahead", 3), ("budget", 4)))
SAGUARO = replace(SSD, options=(*SSD.options, ("saguaro_c", 0.2)))
STOP_BELOW = 0.4
STOPPED = replace(SD, options=(("stop_below", STOP_BELOW),))
TREE = Setting("tree", options=(("nodes", 6), ("depth", 3), ("branching", 3)))
COOL = replace(SD, temperature=0.7)
REFILLED = replace(SSD, repeats=4, max_new_tokens=5)  # a slot changes hands every few rounds

GREEDY = SamplingParams(0.0)
UNDRAFTED = Draft(torch.empty(0, dtype=torch.int64))

# The real ones, whatever is patched later.
verify, accepts, residual = sampling.verify, sampling.accepts, sampling.residual
draw, uniforms_of = drafter.draw, RandomStream.uniforms


class Size(NamedTuple):
    """How much a quick test decodes: enough, by the tokens needed in docs/equivalence.md."""

    repeats: int
    max_new_tokens: int


SMALL, HALF, MEDIUM, FULL = Size(1, 32), Size(1, 64), Size(1, 128), Size(2, 128)


@dataclass(frozen=True)
class Mutant:
    """A broken decoder.

    Attributes:
        name: what is wrong.
        patches: (owner, attribute, replacement), in force while it decodes.
        setting: the honest decoder that it was made from, and what it decodes.
        size: enough for a quick test.
    """

    name: str
    patches: tuple[tuple[Any, str, Any], ...]
    setting: Setting = SD
    size: Size = MEDIUM

    def decode(self, setting: Setting | None = None, seed: int = 0) -> RunData:
        """Decodes by the broken decoder."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, attribute, replacement in self.patches:
                patch.setattr(owner, attribute, replacement)
            return decode(setting or self.setting, seed)


# --- acceptance ----------------------------------------------------------------------------------


def verify_greedily(logits, draft, params, uniforms):
    """Accepts while the draft is the target's favourite, then draws from the target."""
    accepted = verify(logits, draft, GREEDY, ()).accepted
    emitted = verify(logits[accepted : accepted + 1], UNDRAFTED, params, uniforms[-1:])
    return Verification(accepted, emitted.token)


def accept_typical(uniform, p, q):
    """Accepts whatever the target finds likely enough (as typical acceptance does)."""
    return p > 0.3


def accept_with_epsilon(uniform, p, q):
    return uniform * (q + 0.03) < p


@dataclass(frozen=True, slots=True, eq=False)
class Missed(Draft):
    """Drafted by the backup after a cache miss."""


@dataclass(frozen=True, slots=True, eq=False)
class Hit(Draft):
    """Found in the speculation cache."""


def marking_drafts(self, sequence, speculation, honest=SaguaroDecoder._draft_of):
    """SSD's drafts, told apart by whether they were a hit or a miss."""
    draft = honest(self, sequence, speculation)
    kind = {CacheOutcome.HIT: Hit, CacheOutcome.MISS: Missed, None: Draft}[speculation.cache]
    return kind(draft.tokens, draft.probs, draft.ids)


def verify_misses_greedily(logits, draft, params, uniforms):
    broken = isinstance(draft, Missed)
    return (verify_greedily if broken else verify)(logits, draft, params, uniforms)


# --- what is emitted after a rejection, or after the whole draft ---------------------------------


def residual_is_target(p, q, ids, token):
    return p


def residual_is_distance(p, q, ids, token):
    return (p - q).abs()


def residual_not_renormalised(p, q, ids, token):
    """A draw from the unnormalised residual, whose missing mass falls to the likeliest token."""
    left = (p - q).clamp(min=0)
    left[p.argmax()] += 1 - left.sum()
    return left


def residual_greedily(p, q, ids, token):
    left = residual(p, q, ids, token)
    return torch.zeros_like(left).index_fill_(0, left.argmax(), 1.0)


def bonus_from_draft(logits, draft, params, uniforms):
    """The last drafted token serves as the bonus token, unjudged."""
    last = len(draft.tokens) - 1
    if last < 0:
        return verify(logits, draft, params, uniforms)
    judged = replace(draft, tokens=draft.tokens[:last])
    outcome = verify(logits[:-1], judged, params, [*uniforms[:last], uniforms[-1]])
    return Verification(last, int(draft.tokens[last])) if outcome.accepted == last else outcome


# --- q -------------------------------------------------------------------------------------------


def handing_over(q: Callable[[torch.Tensor, SamplingParams], torch.Tensor]):
    """A drafter that draws as it should and hands over another q."""

    def broken(logits, params, uniforms, head_ids, reweight=None):
        drawn = draw(logits, params, uniforms, head_ids, reweight)
        return drawn._replace(q=q(logits, params))

    return broken


def q_without(**changes) -> tuple[tuple[Any, str, Any], ...]:
    """The q that other sampling parameters would have given."""
    other = handing_over(lambda at, params: probabilities(at, replace(params, **changes)))
    return ((drafter, "draw", other), (speculator, "draw", other))


def verify_with(change: Callable[[Draft], Draft]):
    """The real verification of a changed draft."""
    return lambda logits, draft, params, uniforms: verify(logits, change(draft), params, uniforms)


def with_epsilon(draft):
    return replace(draft, probs=None if draft.probs is None else draft.probs + 1e-3)


def with_neighbours_q(draft):
    return replace(draft, probs=None if draft.probs is None else draft.probs.roll(1, 0))


def as_if_full(draft):
    """Column j of the trimmed q is taken for token j."""
    return replace(draft, ids=None)


def resolve_with_neighbours_q(self, outcome, honest=SequenceSpeculation.resolve):
    """A hit keeps its tokens but gets the q rows of another branch."""
    hit = self.cache.lookup(outcome)
    others = [path for path in self.cache.values() if path is not hit]
    if hit and others:
        self.cache.insert(outcome, replace(hit, q=others[0].q[: len(hit.q)]))
    return honest(self, outcome)


def hand_over_after_refill(self, state, honest=Speculator._hand_over):
    """A slot's new sequence is given the q rows that its last one left there."""
    rows = self.q_buffer[state.sequence.slot]
    left = rows.clone()
    answer = honest(self, state)
    if state.after is None and left.any():
        rows.copy_(left)
    return answer


def leave_out_unlikely(self, ids, honest=Proposal.as_draft):
    """The token that stopped the draft, being unlikely, is not submitted."""
    draft = honest(self, ids)
    if draft.probs is None or not len(draft.tokens):
        return draft
    last = len(draft.tokens) - 1
    sure = float(draft.probs[last][draft.tokens[last]])
    kept = last if sure < STOP_BELOW else last + 1
    return replace(draft, tokens=draft.tokens[:kept], probs=draft.probs[:kept])


# --- trees of candidates -------------------------------------------------------------------------

try_children, draw_children = sampling._try_children, tree_drafter.draw_children
NOBODY = -2  # is no node's parent, nor the root


def judge_siblings_apart(p, draft, node, uniforms):
    """Every sibling is judged by p as it was before any was rejected."""
    trial = try_children(p, replace(draft, parents=()), node, uniforms)
    for child in draft.children(node):
        parents = tuple(
            parent if index == child or parent != node else NOBODY
            for index, parent in enumerate(draft.parents)
        )
        trial = try_children(p, replace(draft, parents=parents), node, uniforms)
        if trial.accepted is not None:
            break
    return trial


def try_likeliest_first(logits, params, count, uniforms, head_ids):
    """Siblings were drawn in one order and are tried in another."""
    drawn = draw_children(logits, params, count, uniforms, head_ids)
    rows = [sorted(zip(*row, strict=True), key=lambda s: -s[1]) for row in drawn.siblings]
    return replace(drawn, siblings=[Siblings(*zip(*row, strict=True)) for row in rows])


def rank_by_drawn_token(self, parent, siblings, honest=CandidateTree._add):
    """A node is kept or cut by the probability of the very token that was drawn for it."""
    honest(self, parent, siblings._replace(best=siblings.likelihoods))


def gather_first_cells(self, slot, cells):
    """The first cells behind the trunk are settled, whichever path was accepted."""
    self.truncate(slot, self.lengths[slot] + len(cells))


# --- random numbers ------------------------------------------------------------------------------


def one_stream_for_all(self, role, position, count, after=0):
    return uniforms_of(self, Role.VERIFY, position, count)


def same_every_round(self, role, position, count, after=0):
    return uniforms_of(self, role, 0 if role is Role.VERIFY else position, count, after)


def emission_reuses_acceptance(logits, draft, params, uniforms):
    """The number that rejected a token also draws the one in its place."""
    rejected = verify(logits, draft, params, uniforms).accepted
    return verify(logits, draft, params, [*uniforms[:-1], uniforms[rejected]])


# --- KV and the end of a text --------------------------------------------------------------------


def verify_without_rollback(self, sequences, drafts, honest=Verifier.verify):
    """The KV of a rejected token stays in the place of the token that was emitted instead."""
    memory, rejected = self.cache.memory, [s for s in sequences if getattr(s, "rejected", False)]
    stale = [memory[:, :, s.slot, :, len(s.tokens) - 1].clone() for s in rejected]
    batch = honest(self, sequences, drafts)
    for s, cell in zip(rejected, stale, strict=True):
        memory[:, :, s.slot, :, len(s.tokens) - 1] = cell
    for s, draft, outcome in zip(sequences, drafts, batch.outcomes, strict=True):
        s.rejected = outcome.accepted < len(draft.tokens)
    return batch


def judge_and_gather_wrongly(self, sequences, drafts, logits, honest=Verifier.judge):
    """After a hit the accepted tokens get the KV of their neighbours in the batch."""
    batch = honest(self, sequences, drafts, logits)
    for sequence, draft, outcome in zip(sequences, drafts, batch.outcomes, strict=True):
        if isinstance(draft, Hit):
            own = self.cache.memory[:, :, sequence.slot]
            first, count = len(sequence.tokens), outcome.accepted
            own[..., first : first + count, :] = own[..., first + 1 : first + count + 1, :].clone()
    return batch


def end_swallowed(self, tokens, honest=Sequence.append):
    """An end-of-sequence token that is not the last of its round is lost."""
    block = list(tokens)
    ends = self.request.eos_token_ids
    return honest(self, [t for t in block[:-1] if t not in ends] + block[-1:])


def end_overlooked(self, tokens, honest=Sequence.append):
    """An end-of-sequence token that is not the last of its round ends nothing."""
    *accepted, last = tokens
    request, self.request = self.request, replace(self.request, eos_token_ids=frozenset())
    emitted = honest(self, accepted)
    self.request = request
    return emitted if self.finish else emitted + honest(self, [last])


# --- all of them ---------------------------------------------------------------------------------


def mutant(
    name: str, *patches: tuple[Any, str, Any], setting: Setting = SD, size: Size = MEDIUM
) -> Mutant:
    return Mutant(name, patches, setting, size)


def judging(by: Any) -> tuple[Any, str, Any]:
    return (device_verification, "verify", by)


def left_after_rejection(by: Any) -> tuple[Any, str, Any]:
    return (sampling, "residual", by)


MARKED = (SaguaroDecoder, "_draft_of", marking_drafts)
MUTANTS = (
    mutant("greedy acceptance always", judging(verify_greedily), size=SMALL),
    mutant(
        "greedy acceptance on a miss",
        MARKED,
        judging(verify_misses_greedily),
        setting=SSD,
        size=HALF,
    ),
    mutant("typical acceptance", (sampling, "accepts", accept_typical), size=HALF),
    mutant(
        "epsilon added to q in the acceptance",
        (sampling, "accepts", accept_with_epsilon),
        size=HALF,
    ),
    mutant("epsilon added to q", judging(verify_with(with_epsilon))),
    mutant("residual not subtracted", left_after_rejection(residual_is_target)),
    mutant("residual of the distance", left_after_rejection(residual_is_distance), size=SMALL),
    mutant(
        "residual not renormalised", left_after_rejection(residual_not_renormalised), size=SMALL
    ),
    mutant("likeliest of the residual", left_after_rejection(residual_greedily), size=SMALL),
    mutant("bonus token drawn from q", judging(bonus_from_draft), size=HALF),
    mutant("q before Saguaro's reweighting", *q_without(), setting=SAGUARO, size=SMALL),
    mutant(
        "q of the neighbouring branch",
        (SequenceSpeculation, "resolve", resolve_with_neighbours_q),
        setting=SSD,
        size=SMALL,
    ),
    mutant("q of the neighbouring position", judging(verify_with(with_neighbours_q)), size=SMALL),
    mutant("temperature not in q", *q_without(temperature=1.0), setting=COOL, size=HALF),
    mutant("top-p not in q", *q_without(top_p=1.0), setting=replace(SD, top_p=0.6), size=FULL),
    mutant(
        "trimmed draft treated as full",
        judging(verify_with(as_if_full)),
        setting=replace(SD, trimmed=True),
        size=SMALL,
    ),
    mutant(
        "unlikely token drawn but not submitted",
        (Proposal, "as_draft", leave_out_unlikely),
        setting=STOPPED,
        size=SMALL,
    ),
    mutant(
        "speculation of a previous request after a refill",
        (Speculator, "_hand_over", hand_over_after_refill),
        setting=REFILLED,
        size=Size(4, 5),
    ),
    mutant(
        "one random stream for draft and verifier",
        (RandomStream, "uniforms", one_stream_for_all),
        size=FULL,
    ),
    mutant("the same random numbers every round", (RandomStream, "uniforms", same_every_round)),
    mutant(
        "emission reuses the acceptance's number", judging(emission_reuses_acceptance), size=FULL
    ),
    mutant("stale KV after a rollback", (Verifier, "verify", verify_without_rollback), size=SMALL),
    mutant(
        "KV of the wrong branch after a hit",
        MARKED,
        (Verifier, "judge", judge_and_gather_wrongly),
        setting=SSD,
        size=SMALL,
    ),
    mutant(
        "siblings judged apart",
        (sampling, "_try_children", judge_siblings_apart),
        setting=TREE,
    ),
    mutant(
        "siblings tried likeliest first",
        (tree_drafter, "draw_children", try_likeliest_first),
        setting=TREE,
    ),
    mutant(
        "tree cut by the drawn token's own probability",
        (CandidateTree, "_add", rank_by_drawn_token),
        setting=TREE,
    ),
    mutant("KV of the wrong path of a tree", (KVCache, "gather", gather_first_cells), setting=TREE),
    mutant("EOS swallowed", (Sequence, "append", end_swallowed)),
    mutant("EOS overlooked in the middle of a round", (Sequence, "append", end_overlooked)),
)
