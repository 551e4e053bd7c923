"""AMUSD and PEARL broken on purpose, each by one small change to the real one (see `mutants`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from mutants import FULL, HALF, MEDIUM, SMALL, judging, mutant, uniforms_of, verify
from tiny_runs import Setting

from impl.engine import drafter
from impl.engine.chain_decoder import ChainClient, ChainDecoder
from impl.engine.randomness import Role
from impl.engine.sampling import Verification

AMUSD = Setting("amusd", options=(("max_verified", 4),))
PEARL = Setting("pearl", options=(("lookahead", 3),))


# --- tokens and q's of another chain or block ----------------------------------------------------


def start_while_the_draft_works(self, sequence, allowed, honest=ChainClient.start):
    """The draft draws another token before it reads that its chain is given up."""
    self.process.work(passes=1)
    honest(self, sequence, allowed)


def take_whatever_comes(self, message):
    """Tokens of a chain that was given up count as its successor's."""
    for drafted in message.tokens:
        chain = self.chains.get(drafted.request_id)
        if chain is not None:
            chain.tokens.append(drafted.token)
    self.passes.append(message.span)


def judge_by_earlier_q(back):
    """Each token is judged by the q of the token so many places before it in the chain."""

    def to_judge(self, sequence, fed, honest=ChainDecoder._to_judge):
        draft, chain = honest(self, sequence, fed), self.draft.chain(sequence)
        if chain is None or draft.probs is None:
            return draft
        places = torch.arange(chain.verified, chain.verified + len(draft.tokens)) - back
        rows = places.clamp(min=0) % self.q_buffer.shape[1]
        return replace(draft, probs=self.q_buffer[sequence.slot, rows])

    return to_judge


# --- the token that was not fed ------------------------------------------------------------------


def accept_unfed_unjudged(logits, draft, params, uniforms):
    outcome, last = verify(logits, draft, params, uniforms), len(draft.tokens) - 1
    if len(logits) == len(draft.tokens) and outcome.accepted == last:
        return Verification(last, int(draft.tokens[-1]), token_drafted=True)
    return outcome


def accept_unfed_greedily(logits, draft, params, uniforms):
    """Accepts it if it is the target's favourite, else draws from the target."""
    if len(logits) != len(draft.tokens):
        return verify(logits, draft, params, uniforms)
    last = len(draft.tokens) - 1
    fed = replace(draft, tokens=draft.tokens[:last], probs=draft.probs[:last])
    outcome = verify(logits, fed, params, [*uniforms[:last], uniforms[-1]])
    favourite = int(logits[-1].argmax())
    if outcome.accepted == last and int(draft.tokens[-1]) == favourite:
        return Verification(last, favourite, token_drafted=True)
    return outcome


def keep_unfed_if_likely(self, sequence, fed, honest=ChainDecoder._to_judge):
    """The token drafted beside the pass is not looked at unless the draft held it likely."""
    draft = honest(self, sequence, fed)
    count = len(fed.tokens)
    if len(draft.tokens) == count or draft.probs is None:
        return draft
    likely = float(draft.probs[count, draft.tokens[count]]) > 0.3
    return draft if likely else replace(draft, tokens=draft.tokens[:count])


# --- random numbers ------------------------------------------------------------------------------


def reseeded_by_position(stream, start, token, index):
    """A token is drawn by the number that its position's verification starts with."""
    return float(uniforms_of(stream, Role.VERIFY, start + index, 1)[0])


CHAIN_MUTANTS = (
    mutant(
        "tokens on their way taken for the next chain's",
        (ChainClient, "start", start_while_the_draft_works),
        (ChainClient, "_take", take_whatever_comes),
        setting=AMUSD,
        size=SMALL,
    ),
    mutant(
        "q of the previous block",
        (ChainDecoder, "_to_judge", judge_by_earlier_q(3)),
        setting=PEARL,
        size=HALF,
    ),
    mutant(
        "q of the token before",
        (ChainDecoder, "_to_judge", judge_by_earlier_q(1)),
        setting=AMUSD,
        size=SMALL,
    ),
    mutant("pre-verified token unjudged", judging(accept_unfed_unjudged), setting=PEARL),
    mutant(
        "pre-verified token accepted greedily",
        judging(accept_unfed_greedily),
        setting=PEARL,
        size=HALF,
    ),
    mutant(
        "unlikely tokens left out after they were drawn",
        (ChainDecoder, "_to_judge", keep_unfed_if_likely),
        setting=AMUSD,
        size=MEDIUM,
    ),
    mutant(
        "random numbers reseeded by position",
        (drafter, "draft_uniform", reseeded_by_position),
        setting=PEARL,
        size=FULL,
    ),
)
