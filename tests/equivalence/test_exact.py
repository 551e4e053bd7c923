"""The enumeration of verification: exact for the real code, and it sees every broken variant."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.decoder import SamplingParams
from harness.equivalence import enumeration
from harness.equivalence.chain_enumeration import enumerate_chains
from harness.equivalence.enumeration import enumerate_emissions
from harness.equivalence.exact import check_case, exact_check, reference_distribution
from harness.equivalence.exact_cases import (
    CHAINS,
    DRAFTS,
    PARAMS,
    TREE_DRAFTS,
    Case,
    ChainRound,
    Reweighted,
    SmallDrafter,
    SmallModel,
    default_cases,
)
from impl.engine.chain import Chain
from impl.engine.drafter import draw
from impl.engine.sampling import Draft, Verification, probabilities, residual, sample, verify
from impl.ssd.saguaro_sampling import reweight

PLAIN = SamplingParams(1.0)


def chain(vocab: int, lookahead: int, params: SamplingParams = PLAIN, **drafter) -> Case:
    """A round of one target and one draft; `drafter` changes how the draft draws."""
    small = SmallDrafter(SmallModel(vocab, seed=2), **drafter)
    return Case("chain", SmallModel(vocab, seed=1), params, lookahead, small)


# --- the real code is exact ----------------------------------------------------------------------


def test_every_default_case_is_exact():
    check = exact_check()
    assert check.passed, check.worst
    kinds = {"ar", "chain", "ssd", "tree", "amusd", "pearl"}
    assert {result.name.split(",")[0] for result in check.results} == kinds
    others = 1 + len(DRAFTS) + 2 + 2 * len(TREE_DRAFTS) + len(CHAINS)
    assert len(check.results) == len(PARAMS) * others


@pytest.mark.parametrize(("vocab", "lookahead"), [(2, 1), (2, 4), (3, 3), (5, 1), (5, 2)])
def test_vocabularies_and_lookaheads(vocab, lookahead):
    result = check_case(chain(vocab, lookahead))
    assert result.exact, result
    assert result.sequences == vocab ** (lookahead + 1)


@pytest.mark.parametrize("backup", [SmallDrafter(SmallModel(2, seed=3), drawn=0), None])
def test_three_rounds_of_hits_and_misses(backup):
    drafter = SmallDrafter(SmallModel(2, seed=2), draw=Reweighted(1, 0.5))
    case = Case("ssd", SmallModel(2, seed=1), PLAIN, 1, drafter, 3, backup, fan_out=(0, 1))
    assert check_case(case).exact


# --- worked out by hand --------------------------------------------------------------------------

BY_HAND = Case(
    "by hand",
    SmallModel(3, fixed=(0.5, 0.3, 0.2)),
    PLAIN,
    1,
    SmallDrafter(SmallModel(3, fixed=(0.2, 0.3, 0.5))),
)


STOPPED = replace(BY_HAND, drafter=replace(BY_HAND.drafter, stop_below=0.4))


def first_token(verifier, case: Case = BY_HAND) -> list[float]:
    marginal = [0.0] * 3
    for tokens, weight in enumerate_emissions(case, verifier).items():
        marginal[tokens[0]] += weight
    return marginal


def test_exact_rule_by_hand():
    # Accepted: (.2, .3, .2); rejected mass .3, all of it emitted as token 0.
    assert first_token(verify) == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)


def test_accepted_sequences_by_hand():
    # Token 2 drafted (.5) and accepted (.2 / .5), then any bonus token; rejected, then token 0.
    emitted = enumerate_emissions(BY_HAND)
    assert emitted[2, 0] == pytest.approx(0.2 * 0.5, abs=1e-12)
    assert emitted[0,] == pytest.approx(0.3, abs=1e-12)
    assert (1,) not in emitted
    assert (2,) not in emitted


def test_greedy_acceptance_by_hand():
    # Token 0 is accepted when drafted (.2); the other .8 is emitted from p, or from the residual
    # (.3, 0, 0), which is token 0 for sure.
    from_p = first_token(rejecting_by(greedily, from_target))
    assert from_p == pytest.approx([0.2 + 0.8 * 0.5, 0.8 * 0.3, 0.8 * 0.2], abs=1e-9)
    assert first_token(rejecting_by(greedily)) == pytest.approx([1, 0, 0], abs=1e-9)


def test_a_draft_that_stops_when_unsure_by_hand():
    # Only token 2 (.5) goes on to a second: 2 accepted (.2 / .5), then .5 * .4 of (2, 2, bonus).
    emitted = enumerate_emissions(replace(STOPPED, lookahead=2))
    assert emitted[2, 2, 1] == pytest.approx(0.5 * 0.4 * 0.5 * 0.4 * 0.3, abs=1e-12)
    # 0 and 1 stop the draft: both are always accepted, the bonus token is all that follows.
    assert emitted[0, 2] == pytest.approx(0.2 * 0.2, abs=1e-12)
    assert emitted[1, 1] == pytest.approx(0.3 * 0.3, abs=1e-12)
    assert not any(len(tokens) == 3 and tokens[0] < 2 for tokens in emitted)


def test_reference_distribution_by_hand():
    logits = np.log([0.1, 0.4, 0.2, 0.3])

    def of(*params):
        return reference_distribution(logits, SamplingParams(*params)).tolist()

    assert of(0.0) == [0, 1, 0, 0]
    assert of(1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert of(0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])
    assert of(1.0, 2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert of(1.0, 0, 0.65) == pytest.approx([0, 4 / 7, 0, 3 / 7])  # .4 + .3 reach .65
    assert of(1.0, 0, 0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert of(1.0, 2, 0.5) == [0, 1, 0, 0]  # 4/7 of what top-k left reaches .5


# --- what is not exact is seen -------------------------------------------------------------------


def rejecting_by(accept: Callable, left: Callable = residual, emission: int = -1):
    """`verify` with another acceptance rule, residual, or uniform for the emitted token."""

    def verifier(logits, draft, params, uniforms):
        p = probabilities(logits, params)
        for i, token in enumerate(draft.tokens.tolist()):
            if not accept(uniforms[i], p[i], draft.probs[i], token):
                uniform = uniforms[emission if emission < 0 else i]
                return Verification(i, drawn(left(p[i], draft.row(i), None, token), uniform))
        return Verification(len(p) - 1, drawn(p[-1], uniforms[-1]))

    return verifier


def drawn(weights: torch.Tensor, uniform: float) -> int:
    return int(sample(weights, torch.tensor(uniform, dtype=torch.float64)))


def exactly(u, p, q, token):
    return u * q[token] < p[token]


def greedily(u, p, q, token):
    return token == int(p.argmax())


def from_target(p, *_):
    return p


def from_distance(p, q, *_):
    return (p - q).abs()


VERIFIERS = {
    "greedy acceptance": rejecting_by(greedily),
    "greedy acceptance, then the target": rejecting_by(greedily, from_target),
    "emits from p after a rejection": rejecting_by(exactly, from_target),
    "emits from |p - q|": rejecting_by(exactly, from_distance),
    "epsilon added to q": rejecting_by(lambda u, p, q, t: u * (q[t] + 1e-6) < p[t]),
    "emission shares the acceptance uniform": rejecting_by(exactly, emission=0),
}


def test_the_rebuilt_rule_is_exact_before_it_is_broken():
    assert check_case(chain(3, 1), rejecting_by(exactly)).exact


@pytest.mark.parametrize("name", VERIFIERS)
def test_broken_verifications_are_seen(name):
    result = check_case(chain(3, 1), VERIFIERS[name])
    assert not result.exact
    assert result.error > 1e-8


def test_the_q_of_another_position_is_seen():
    def shifted(logits, draft, params, uniforms):
        return verify(logits, Draft(draft.tokens, draft.probs.flip(0)), params, uniforms)

    assert check_case(chain(2, 2)).exact
    assert check_case(chain(2, 2), shifted).error > 1e-3


def test_an_impossible_token_is_seen_at_a_single_uniform():
    # u <= p/q with p = 0 accepts at u = 0 only: one draw in 2^53.
    target = SmallModel(3, seed=1, masked=frozenset({1}))
    case = Case("zeros", target, PLAIN, 1, SmallDrafter(SmallModel(3, seed=2)))
    result = check_case(case, rejecting_by(lambda u, p, q, t: u * q[t] <= p[t]))
    assert result.error < 1e-9
    assert result.impossible > 0
    assert not result.exact


def without_temperature(logits, params, uniforms, head_ids):
    drawn = draw(logits, params, uniforms, head_ids)
    return drawn._replace(q=probabilities(logits, SamplingParams(1.0)))


def before_truncation(logits, params, uniforms, head_ids):
    drawn = draw(logits, params, uniforms, head_ids)
    return drawn._replace(q=probabilities(logits, SamplingParams(params.temperature)))


def before_reweighting(logits, params, uniforms, head_ids):
    drawn = Reweighted(1, 0.5)(logits, params, uniforms, head_ids)
    return drawn._replace(q=probabilities(logits, params))


def after_reweighting_only(logits, params, uniforms, head_ids):
    drawn = draw(logits, params, uniforms, head_ids)
    return drawn._replace(q=reweight(drawn.q, 1, 0.5))


DRAWS = {
    "temperature not in q": (without_temperature, SamplingParams(0.5)),
    "top-p not in q": (before_truncation, SamplingParams(1.0, top_p=0.7)),
    "top-k not in q": (before_truncation, SamplingParams(1.0, top_k=2)),
    "Saguaro weights not in q": (before_reweighting, PLAIN),
    "Saguaro weights in q only": (after_reweighting_only, PLAIN),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_q_that_the_tokens_were_not_drawn_from_is_seen(name):
    wrong, params = DRAWS[name]
    assert check_case(chain(3, 1, params)).exact
    assert check_case(chain(3, 1, params, draw=wrong)).error > 1e-3


def leaving_out_unlikely(case, state, honest=enumeration._drafts):
    """Drafts whose last token is left out where it is what stopped them."""
    for draft, weight in honest(case, state):
        last = len(draft.tokens) - 1
        sure = float(draft.probs[last][draft.tokens[last]])
        if sure < state.drafter.stop_below:
            draft = Draft(draft.tokens[:last], draft.probs[:last])
        yield draft, weight


def test_leaving_out_an_unlikely_token_that_was_drawn_is_seen(monkeypatch):
    assert check_case(STOPPED).exact
    monkeypatch.setattr(enumeration, "_drafts", leaving_out_unlikely)
    # Token 0 or 1 (.5) is left out and p emits; token 2 (.5) is accepted (.4), or 0 is emitted.
    expected = [0.5 * 0.5 + 0.3, 0.5 * 0.3, 0.5 * 0.2 + 0.2]
    assert first_token(verify, STOPPED) == pytest.approx(expected, abs=1e-12)
    assert check_case(STOPPED).error > 0.01


def test_greedy_acceptance_after_a_miss_only_is_seen_in_the_second_round():
    def greedy_on_filler(logits, draft, params, uniforms):
        honest = draft.probs is not None
        return (verify if honest else greedy_rule)(logits, draft, params, uniforms)

    def greedy_rule(logits, draft, params, uniforms):
        p = probabilities(logits, params)
        if int(draft.tokens[0]) != int(p[0].argmax()):
            return Verification(0, drawn(p[0], uniforms[-1]))
        return Verification(1, drawn(p[1], uniforms[-1]))

    case = next(case for case in default_cases() if case.name == "ssd, fast backup, T = 1")
    assert check_case(case).exact
    assert not check_case(case, greedy_on_filler).exact


def test_a_check_fails_with_its_worst_case():
    cases: Sequence[Case] = [chain(3, 0), chain(3, 1)]
    check = exact_check(cases, rejecting_by(greedily))
    assert not check.passed
    assert [result.exact for result in check.results] == [True, False]
    assert check.worst == check.results[1]


@pytest.mark.parametrize("name", ["zeros in q", "drawn, then filler", "trimmed vocabulary"])
def test_longer_drafts(name):
    target, drafter = DRAFTS[name]
    assert all(check_case(Case(name, target, params, 3, drafter)).exact for params in PARAMS)


# --- a draft that goes on by itself --------------------------------------------------------------


def going_on(*rounds: ChainRound, target: SmallModel, draft: SmallModel) -> Case:
    most = max(round_.most for round_ in rounds)
    return Case("chain", target, PLAIN, most, SmallDrafter(draft), chain=rounds)


@pytest.mark.parametrize(
    "rounds",
    [
        [
            ChainRound(0, 1, 2),
            ChainRound(0, 1, 2),
            ChainRound(0, 1, 1),
        ],  # further and further ahead
        [ChainRound(0, 2, 1), ChainRound(2, 2, 0), ChainRound(1, 1, 2)],
        [ChainRound(1, 1, 0), ChainRound(0, 1, 1), ChainRound(0, 1, 1)],
    ],
)
def test_any_schedule_of_rounds_is_exact(rounds):
    models = {"target": SmallModel(2, seed=1), "draft": SmallModel(2, seed=2)}
    assert check_case(going_on(*rounds, **models)).exact


def test_pearl_by_hand():
    # Pre-verify judges s_1 alone. Token 2 (.5) is accepted with .2 / .5; rejected, 0 is emitted and
    # the chain is given up. s_2, drafted meanwhile, is fed next and judged with s_3.
    models = {"target": BY_HAND.target, "draft": BY_HAND.drafter.model}
    pre_verify = going_on(ChainRound(0, 2, 2), **models)
    assert enumerate_chains(pre_verify) == pytest.approx(
        {(0,): 0.2 + 0.3, (1,): 0.3, (2,): 0.2}, abs=1e-12
    )
    both = enumerate_chains(going_on(ChainRound(0, 2, 2), ChainRound(0, 2, 2), **models))
    # s_1 = s_2 = s_3 = 2, all accepted.
    assert both[2, 2, 2] == pytest.approx(0.2**3, abs=1e-12)
    # 0 by a rejection (.3): pre-verify again, one token from p. 0 as s_1 (.2): s_2 is rejected
    # (.3), which emits 0 and ends the round.
    assert both[0, 0] == pytest.approx(0.3 * 0.5 + 0.2 * 0.3, abs=1e-12)
    assert both[0, 2] == pytest.approx(0.3 * 0.2, abs=1e-12)


def unjudged_if_not_fed(logits, draft, params, uniforms):
    """The token drafted beside the pass is taken over as it is."""
    outcome = verify(logits, draft, params, uniforms)
    last = len(draft.tokens) - 1
    if len(logits) == len(draft.tokens) and outcome.accepted == last:
        return Verification(last, int(draft.tokens[-1]), token_drafted=True)
    return outcome


def greedy_if_not_fed(logits, draft, params, uniforms):
    """The token drafted beside the pass is accepted if it is the target's favourite."""
    if len(logits) != len(draft.tokens):
        return verify(logits, draft, params, uniforms)
    fed = Draft(draft.tokens[:-1], draft.probs[:-1], draft.ids)
    outcome = verify(logits, fed, params, [*uniforms[:-2], uniforms[-1]])
    favourite = int(logits[-1].argmax())
    if outcome.accepted == len(fed.tokens) and int(draft.tokens[-1]) == favourite:
        return Verification(outcome.accepted, favourite, token_drafted=True)
    return outcome


@pytest.mark.parametrize("broken", [unjudged_if_not_fed, greedy_if_not_fed])
@pytest.mark.parametrize("name", ["amusd, drafting on, T = 1", "pearl, T = 1"])
def test_a_token_that_was_not_fed_and_is_judged_otherwise_is_seen(name, broken):
    case = next(case for case in default_cases() if case.name == name)
    assert check_case(case, broken).error > 1e-3


def test_a_chain_that_goes_on_behind_a_rejection_is_seen(monkeypatch):
    """Its tokens were drawn for another text than the q's that they are judged by."""

    def never_given_up(self, judged, outcome):
        self.verified += judged
        return True

    monkeypatch.setattr(Chain, "follow", never_given_up)
    case = next(case for case in default_cases() if case.name == "pearl, T = 1")
    assert check_case(case).error > 1e-3
