"""Temperature, top-k, top-p, inverse-CDF draws and verification, on values worked by hand."""

import math

import pytest
import torch

from harness.decoder import SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine.sampling import (
    Draft,
    TreeDraft,
    Verification,
    accepts,
    argmax,
    probabilities,
    residual,
    sample,
    verify,
    without,
)

ALMOST_ONE = 1 - 2.0**-53
PLAIN = SamplingParams(temperature=1.0)


def logits_of(*rows):
    """Float64 logits whose softmax is the given rows; -inf where a probability is 0."""
    return torch.tensor(rows, dtype=torch.float64).log()


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- probabilities ---------------------------------------------------------------------------


def test_temperature_sharpens_by_the_power_one_over_t():
    # p^(1/T) with T = 0.5: (.25, .09, .04) / .38
    probs = probabilities(logits_of((0.5, 0.3, 0.2)), SamplingParams(temperature=0.5))
    assert probs[0].tolist() == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=1e-12)


def test_temperature_zero_is_one_hot_on_the_lowest_tied_id():
    probs = probabilities(torch.tensor([[1.0, 3.0, 3.0]]), SamplingParams(temperature=0))
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


def test_top_k_keeps_k_and_renormalises():
    probs = probabilities(logits_of((0.1, 0.4, 0.2, 0.3)), SamplingParams(1.0, top_k=2))
    assert probs[0].tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-12)


def test_top_k_cuts_a_tie_by_id():
    probs = probabilities(torch.zeros(2, 4), SamplingParams(1.0, top_k=2))
    assert probs.tolist() == [[0.5, 0.5, 0, 0]] * 2


@pytest.mark.parametrize("top_k", [4, 5, 0])
def test_top_k_of_the_whole_vocabulary_or_zero_is_off(top_k):
    probs = probabilities(logits_of((0.1, 0.4, 0.2, 0.3)), SamplingParams(1.0, top_k=top_k))
    assert probs[0].tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=1e-12)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.01, [1, 0, 0, 0]),  # never empty
        (0.49, [1, 0, 0, 0]),
        (0.51, [0.5 / 0.75, 0.25 / 0.75, 0, 0]),
        (0.8, [0.5 / 0.875, 0.25 / 0.875, 0.125 / 0.875, 0]),  # two of the equal tail: lower id
        (0.99, [0.5, 0.25, 0.125, 0.125]),
    ],
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p, expected):
    probs = probabilities(logits_of((0.5, 0.25, 0.125, 0.125)), SamplingParams(1.0, top_p=top_p))
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_top_p_counts_within_what_top_k_left():
    # top-k 2 leaves (.5, .3) -> (.625, .375): .6 of that mass is reached by the first token alone.
    probs = probabilities(logits_of((0.5, 0.3, 0.2)), SamplingParams(1.0, top_k=2, top_p=0.6))
    assert probs.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_equals_a_full_stable_sort_on_a_large_vocabulary(dtype, top_p):
    # Flat and peaked rows side by side: the nucleus outgrows the first ranking in some only.
    noise = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    logits = (noise * torch.tensor([[0.1], [2.0], [8.0]])).to(dtype)
    plain = torch.softmax(logits.double(), -1)

    probs = probabilities(logits, SamplingParams(1.0, top_p=top_p))

    for row, kept in zip(plain, probs > 0, strict=True):
        order = row.sort(descending=True, stable=True).indices
        size = int((row[order].cumsum(0) < top_p).sum()) + 1
        # bfloat16 logits tie often; float32 masses may move the edge by one token.
        assert abs(int(kept.sum()) - size) <= 1
        assert set(order[: size - 1].tolist()) <= set(kept.nonzero()[:, 0].tolist())
    assert probs.sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_low_precision_logits_are_widened_before_the_division():
    logits = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)
    probs = probabilities(logits, SamplingParams(temperature=0.7))
    assert probs.dtype == torch.float32
    assert probs[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1 / 0.7)), abs=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_name_the_row(bad, temperature):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    draft = Draft(torch.tensor([0, 0]))
    with pytest.raises(NonFiniteLogitsError, match="row 1 of 3"):
        probabilities(logits, SamplingParams(temperature))
    with pytest.raises(NonFiniteLogitsError, match="row 1 of 3"):
        verify(logits, draft, SamplingParams(temperature), [0.0, 0.0, 0.0])


def test_masked_tokens_are_fine_but_a_fully_masked_row_is_not():
    assert probabilities(torch.tensor([0.0, -math.inf]), PLAIN).tolist() == [1, 0]
    with pytest.raises(NonFiniteLogitsError):
        argmax(torch.full((2, 3), -math.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_argmax_takes_the_lowest_id_on_a_tie(dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]], dtype=dtype)
    assert argmax(logits).tolist() == [1, 0]
    assert argmax(logits[0]).item() == 1


# --- sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (ALMOST_ONE, 4)],
)
def test_sample_inverts_the_cumulative_distribution(uniform, token):
    probs = tensor(0, 0.25, 0, 0.5, 0.25, 0)
    assert sample(probs, tensor(uniform)[0]).item() == token


@pytest.mark.parametrize("total", [1e-30, 0.3, 0.9999999, 1.0000001])
def test_sample_never_leaves_the_support_whatever_the_total(total):
    probs = tensor(0, 0.1, 0, 0.7, 0.2, 0) * total
    for dtype in (torch.float32, torch.float64):
        assert sample(probs.to(dtype), tensor(0.0)[0]).item() == 1
        assert sample(probs.to(dtype), tensor(ALMOST_ONE)[0]).item() == 4


def test_sample_draws_each_row_with_its_own_uniform():
    probs = tensor(0.5, 0.5).expand(2, 2, 2)
    assert sample(probs, tensor(0.1, 0.9, 0.9, 0.1).view(2, 2)).tolist() == [[0, 1], [1, 0]]


# --- verify ----------------------------------------------------------------------------------

P = (0.5, 0.3, 0.2)
Q = (0.2, 0.3, 0.5)


def verify_one(token, uniforms, p=P, q=Q, ids=None, bonus=P, params=PLAIN):
    rows = None if q is None else tensor(*q)[None]
    draft = Draft(torch.tensor([token]), rows, None if ids is None else torch.tensor(ids))
    outcome = verify(logits_of(p, bonus), draft, params, uniforms)
    return outcome.accepted, outcome.token


def test_acceptance_and_residual_by_hand():
    # Token 2: p/q = .4; the residual max(p - q, 0) is (.3, 0, 0): always token 0.
    assert verify_one(2, [0.39, 0.0]) == (1, 0)
    assert verify_one(2, [0.41, 0.0]) == (0, 0)
    assert verify_one(2, [0.41, ALMOST_ONE]) == (0, 0)
    # Tokens 0 and 1 have p >= q: always accepted; the bonus comes from p by the last uniform.
    assert verify_one(0, [ALMOST_ONE, 0.6]) == (1, 1)
    assert verify_one(1, [1 - 1e-12, 0.9]) == (1, 2)


def test_u_zero_never_accepts_an_impossible_token():
    assert verify_one(0, [0.0, 0.0], p=(0, 0.5, 0.5), q=(1, 0, 0)) == (0, 1)
    assert not accepts(0.0, 0.0, 0.5)
    assert not accepts(0.0, 0.0, 0.0)
    assert accepts(ALMOST_ONE, 1e-300, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_always_accept(dtype):
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = probabilities(logits[:1], PLAIN)
    for token in range(500):
        draft = Draft(torch.tensor([token]), q)
        assert verify(logits, draft, PLAIN, [ALMOST_ONE, 0.0]).accepted == 1


def test_disjoint_supports_always_reject_and_emit_the_target():
    for uniform, token in [(0.0, 2), (0.49, 2), (0.51, 3)]:
        p = (0, 0, 0.5, 0.5)
        assert verify_one(0, [0.0, uniform], p, q=(0.5, 0.5, 0, 0), bonus=p) == (0, token)


def test_point_mass_is_accepted_with_p_and_its_residual_leaves_it_out():
    # Residual of p without token 0: (0, .3, .2), that is (.6, .4).
    assert verify_one(0, [0.49, 0.0], q=None) == (1, 0)
    assert verify_one(0, [0.51, 0.59], q=None) == (0, 1)
    assert verify_one(0, [0.51, 0.61], q=None) == (0, 2)


def test_trimmed_vocabulary_is_indexed_by_its_ids():
    # q has columns for ids 2 and 0 only: q(2) = .75, q(0) = .25; p - q = (.25, .3, -.55).
    trimmed = {"q": (0.75, 0.25), "ids": (2, 0)}
    assert verify_one(2, [0.2 / 0.75 - 1e-9, 0.0], **trimmed) == (1, 0)
    assert verify_one(2, [0.2 / 0.75 + 1e-9, 0.25 / 0.55 - 1e-9], **trimmed) == (0, 0)
    assert verify_one(2, [0.2 / 0.75 + 1e-9, 0.25 / 0.55 + 1e-9], **trimmed) == (0, 1)
    assert verify_one(0, [ALMOST_ONE, 0.0], **trimmed) == (1, 0)


def test_smaller_draft_vocabulary_counts_on_the_common_part():
    # Columns 0 and 1 only; p - q = (-.1, -.1, .2): a rejection can only emit token 2.
    assert verify_one(0, [0.9, 0.0], q=(0.6, 0.4)) == (0, 2)
    assert verify_one(0, [0.8, 0.0], q=(0.6, 0.4)) == (1, 0)  # .8 < .5 / .6


def test_larger_draft_vocabulary_counts_on_the_common_part():
    # Token 3 is padding that the target lacks; p - q = (.3, 0, -.2) on the common part.
    assert verify_one(3, [0.0, 0.5], q=(0.2, 0.3, 0.4, 0.1)) == (0, 0)
    assert verify_one(2, [0.51, 0.5], q=(0.2, 0.3, 0.4, 0.1)) == (0, 0)
    assert verify_one(2, [0.49, 0.0], q=(0.2, 0.3, 0.4, 0.1)) == (1, 0)


def test_a_point_mass_outside_the_target_vocabulary_is_rejected():
    assert verify_one(7, [0.0, 0.9], q=None) == (0, 2)


def test_speculation_then_filler_mixes_rows_and_point_masses():
    draft = Draft(torch.tensor([0, 1]), tensor(*Q)[None])
    logits = logits_of(P, P, P)
    # Second token is a point mass: accepted below p = .3, its residual is (.5, 0, .2).
    assert verify(logits, draft, PLAIN, [0.9, 0.29, 0.0]).accepted == 2
    outcome = verify(logits, draft, PLAIN, [0.9, 0.31, 0.5 / 0.7 + 1e-9])
    assert (outcome.accepted, outcome.token) == (1, 2)


def test_residual_that_rounds_to_nothing_falls_back_to_p():
    p = tensor(*P)
    assert torch.equal(residual(p, p, None, 0), p)
    assert torch.equal(p, tensor(*P))  # never changed in place


def test_top_p_binds_the_target():
    # top-p .5 leaves token 0 only; token 1 has become impossible.
    params = SamplingParams(1.0, top_p=0.45)
    assert verify_one(1, [0.0, 0.9], params=params) == (0, 0)


def test_greedy_accepts_while_the_draft_is_the_argmax():
    logits = torch.tensor([[0, 9, 1], [3, 2, 1], [0, 1, 8], [5, 0, 0]], dtype=torch.bfloat16)
    greedy = SamplingParams(temperature=0)
    for tokens, expected in [((1, 0, 2), (3, 0)), ((1, 2, 2), (1, 0)), ((0, 0, 2), (0, 1))]:
        outcome = verify(logits, Draft(torch.tensor(tokens)), greedy, ())
        assert (outcome.accepted, outcome.token) == expected


def test_no_draft_is_plain_sampling():
    outcome = verify(logits_of(P), Draft(torch.empty(0, dtype=torch.int64)), PLAIN, [0.79])
    assert (outcome.accepted, outcome.token) == (0, 1)


def test_a_token_that_was_not_fed_takes_the_bonus_tokens_place():
    # Token 0 has p >= q. Token 2: p/q = .4, and the residual is all token 0.
    draft = Draft(torch.tensor([0, 2]), tensor(Q, Q))
    accepted = verify(logits_of(P, P), draft, PLAIN, [0.9, 0.39, 0.9])
    assert accepted == Verification(1, 2, token_drafted=True)
    rejected = verify(logits_of(P, P), draft, PLAIN, [0.9, 0.41, 0.9])
    assert rejected == Verification(1, 0)
    greedy = SamplingParams(temperature=0)
    logits = torch.tensor([[0.0, 9, 1], [3, 2, 1]])
    for tokens, expected in [
        ((1, 0), Verification(1, 0, token_drafted=True)),
        ((1, 2), Verification(1, 0)),
        ((0, 0), Verification(0, 1)),
    ]:
        assert verify(logits, Draft(torch.tensor(tokens)), greedy, ()) == expected


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="K \\+ 1"):
        verify(logits_of(P), Draft(torch.tensor([0, 0])), PLAIN, [0.5] * 3)
    with pytest.raises(ValueError, match="K \\+ 1"):
        verify(logits_of(P, P, P), Draft(torch.tensor([0])), PLAIN, [0.5, 0.5])
    with pytest.raises(ValueError, match="uniforms"):
        verify(logits_of(P, P), Draft(torch.tensor([0])), PLAIN, [0.5])


def test_rows_after_a_rejection_are_not_looked_at():
    logits = logits_of(P, P, P)
    logits[1:] = math.nan
    outcome = verify(logits, Draft(torch.tensor([2, 0])), PLAIN, [0.9, 0.0, 0.0])
    assert outcome.accepted == 0


def test_the_largest_uniform_stays_below_any_total():
    # 1 - 2^-53 times a total is at least half an ulp below it, whatever its mantissa.
    totals = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    probs = torch.cat([totals / 2, totals / 2, torch.zeros_like(totals)], 1)
    uniforms = torch.full((10_000,), ALMOST_ONE, dtype=torch.float64)
    assert sample(probs, uniforms).unique().tolist() == [1]


# --- trees -----------------------------------------------------------------------------------

TREE_P, TREE_Q = (0.5, 0.4, 0.1), (0.2, 0.2, 0.6)


def siblings(*tokens, q=TREE_Q, ids=None):
    rows = None if q is None else tensor(*q)[None]
    where = None if ids is None else torch.tensor(ids)
    count = len(tokens)
    return TreeDraft(torch.tensor(tokens), rows, where, (-1,) * count, (0,) * count)


def verify_siblings(draft, uniforms, p=TREE_P, params=PLAIN):
    outcome = verify(logits_of(*[p] * (len(draft.tokens) + 1)), draft, params, uniforms)
    return outcome.path, outcome.token


def test_a_sibling_is_judged_by_the_residual_and_by_q_without_the_rejected_token():
    # Token 2: .1 / .6 = 1/6. Rejected: p becomes (.3, .2, 0) / .5 = (.6, .4, 0), q (.5, .5, 0).
    # Token 1 then: .4 / .5 = .8. Rejected: only token 0 is left.
    draft = siblings(2, 1)
    assert verify_siblings(draft, [1 / 6 - 1e-9, 0.0, 0.0]) == ((0,), 0)
    assert verify_siblings(draft, [1 / 6 + 1e-9, 0.8 - 1e-9, 0.95]) == ((1,), 2)
    assert verify_siblings(draft, [1 / 6 + 1e-9, 0.8 + 1e-9, ALMOST_ONE]) == ((), 0)
    # Token 0 in its place: .6 / .5 is always accepted.
    assert verify_siblings(siblings(2, 0), [0.2, ALMOST_ONE, 0.0]) == ((1,), 0)


def test_siblings_under_a_trimmed_vocabulary():
    # q: .25 on token 0, .75 on token 2. Token 2: .1 / .75. Rejected: p - q = (.25, .4, -.65)
    # -> (.25, .4, 0) / .65, and q has only token 0 left: .25 / .65. Rejected again:
    # p - q = (-, .4 / .65, 0): token 1.
    draft = siblings(2, 0, q=(0.25, 0.75), ids=(0, 2))
    assert verify_siblings(draft, [0.1 / 0.75 - 1e-9, 0.0, 0.0])[0] == (0,)
    assert verify_siblings(draft, [0.1 / 0.75 + 1e-9, 0.25 / 0.65 - 1e-9, 0.0])[0] == (1,)
    assert verify_siblings(draft, [0.2, 0.25 / 0.65 + 1e-9, 0.0]) == ((), 1)


def test_point_mass_siblings_are_accepted_with_what_is_left_of_p():
    # Token 0 with .5; then token 2 with .1 / .5; then the rest is token 1.
    draft = siblings(0, 2, q=None)
    assert verify_siblings(draft, [0.49, 0.0, 0.0])[0] == (0,)
    assert verify_siblings(draft, [0.51, 0.19, 0.0])[0] == (1,)
    assert verify_siblings(draft, [0.51, 0.21, ALMOST_ONE]) == ((), 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_path_goes_on_behind_the_accepted_sibling(temperature):
    # 0 and 1 at first; 2 behind 0; 0 behind 1. The target goes 1, 0, 2 for sure.
    sure = logits_of((0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    rows = None if temperature == 0 else tensor(*[1 / 3] * 3).expand(3, 3)
    draft = TreeDraft(torch.tensor([0, 1, 2, 0]), rows, None, (-1, -1, 0, 1), (0, 0, 1, 2))
    outcome = verify(sure, draft, SamplingParams(temperature), [0.5] * 5)
    assert (outcome.accepted, outcome.path, outcome.token) == (2, (1, 3), 2)
    assert list(outcome.nodes) == [1, 3]


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.0), SamplingParams(0.7, 20, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tree_without_siblings_is_the_chain_bit_for_bit(params, dtype):
    random = torch.Generator().manual_seed(0)
    accepted = set()
    for _ in range(200):
        logits = 2 * torch.randn(5, 50, generator=random).to(dtype)
        q = probabilities(logits[:4] + torch.randn(4, 50, generator=random).to(dtype), params)
        tokens = sample(q, torch.rand(4, generator=random, dtype=torch.float64))
        uniforms = torch.rand(5, generator=random, dtype=torch.float64).tolist()
        chain = verify(logits, Draft(tokens, q), params, uniforms)
        tree = verify(
            logits, TreeDraft(tokens, q, None, (-1, 0, 1, 2), (0, 1, 2, 3)), params, uniforms
        )
        assert (tree.accepted, tree.token) == (chain.accepted, chain.token)
        assert list(tree.nodes) == list(chain.nodes)
        accepted.add(chain.accepted)
    assert accepted == set(range(5))


def test_q_without_a_token_is_renormalised():
    q = tensor(*TREE_Q)
    assert without(q, None, 2).tolist() == pytest.approx([0.5, 0.5, 0])
    assert without(q, torch.tensor([7, 3, 9]), 7).tolist() == pytest.approx([0, 0.25, 0.75])
    assert without(None, None, 2) is None
    assert torch.equal(q, tensor(*TREE_Q))  # never changed in place
