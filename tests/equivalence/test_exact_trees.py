"""Trees of candidates, enumerated: exact for the real code, and every broken variant is seen."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from harness.decoder import SamplingParams
from harness.equivalence.enumeration import enumerate_emissions
from harness.equivalence.exact import check_case
from harness.equivalence.exact_cases import DRAFTS, PARAMS, Case, SmallDrafter, SmallModel
from impl.engine import sampling, tree_drafter
from impl.engine.candidate_tree import CandidateTree, Siblings, TreePlan

PLAIN = SamplingParams(1.0)
STATIC = TreePlan.static((2, 1))
DYNAMIC = TreePlan.dynamic(nodes=3, depth=2, branching=2)


def case_of(plan, vocab=3, params=PLAIN, target=None, drafter=None):
    target = target or SmallModel(vocab, seed=1)
    drafter = drafter or SmallDrafter(SmallModel(vocab, seed=2))
    return Case("tree", target, params, len(plan.children), drafter, tree=plan)


# --- the real code is exact ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "vocab"),
    [
        (TreePlan.static((3,)), 4),
        (TreePlan.static((1, 2)), 3),
        (TreePlan.static((2, 2)), 2),
        (TreePlan.static((2, 1, 1)), 2),
        (TreePlan.dynamic(nodes=1, depth=1, branching=2), 4),
        (TreePlan.dynamic(nodes=2, depth=3, branching=2), 3),
        (TreePlan.dynamic(nodes=5, depth=3, branching=2), 2),
        # two children each, but only the likelier of them is fed
        (TreePlan(children=(2, 2), fed=1, kept=3), 3),
        (TreePlan(children=(2, 1, 1), fed=1, kept=4), 3),
    ],
    ids=str,
)
def test_shapes_of_trees(plan, vocab):
    result = check_case(case_of(plan, vocab))
    assert result.exact, result


@pytest.mark.parametrize(
    "name", ["disjoint supports", "trimmed to one token", "smaller vocabulary"]
)
def test_more_kinds_of_drafts(name):
    target, drafter = DRAFTS[name]  # the certificate has the others
    for plan, params in product((STATIC, DYNAMIC), PARAMS):
        result = check_case(case_of(plan, params=params, target=target, drafter=drafter))
        assert result.exact, (params, result)


def test_a_draft_padded_beyond_the_target():
    target, drafter = DRAFTS["padded beyond the target"]
    assert check_case(case_of(STATIC, target=target, drafter=drafter)).exact


def test_two_rounds():
    case = replace(case_of(TreePlan.dynamic(nodes=2, depth=1, branching=2), 2), rounds=2)
    assert check_case(case).exact


# --- worked out by hand --------------------------------------------------------------------------

BY_HAND = case_of(
    TreePlan.static((2,)),
    target=SmallModel(3, fixed=(0.5, 0.4, 0.1)),
    drafter=SmallDrafter(SmallModel(3, fixed=(0.2, 0.2, 0.6))),
)


def first_token(case=BY_HAND):
    marginal = [0.0] * case.target.vocab
    for tokens, weight in enumerate_emissions(case).items():
        marginal[tokens[0]] += weight
    return marginal


def test_two_siblings_by_hand():
    # 0 or 1 first (.2 each): accepted. 2 first (.6): accepted with 1/6. Else (.5) p is
    # (.6, .4, 0) and q (.5, .5, 0): 0 (.5) is accepted, 1 (.5) with .8; else 0 is emitted.
    emitted = enumerate_emissions(BY_HAND)
    assert emitted[0,] == pytest.approx(0.5 * 0.5 * 0.2, abs=1e-12)
    accepted = (0.2 + 0.5 * 0.5, 0.2 + 0.5 * 0.5 * 0.8, 0.6 / 6)
    for token, bonus in np.ndindex(3, 3):
        expected = accepted[token] * (0.5, 0.4, 0.1)[bonus]
        assert emitted[token, bonus] == pytest.approx(expected, abs=1e-12)
    assert first_token() == pytest.approx([0.5, 0.4, 0.1], abs=1e-12)


# --- what is not exact is seen -------------------------------------------------------------------

# The real ones, whatever is patched later.
honest_children, honest_draw = sampling._try_children, tree_drafter.draw_children
NOBODY = -2  # is no node's parent, nor the root


def each_alone(p, draft, node, uniforms):
    """Every sibling is judged by p as it was before any was rejected."""
    trial = honest_children(p, replace(draft, parents=()), node, uniforms)
    for child in draft.children(node):
        parents = tuple(
            parent if index == child or parent != node else NOBODY
            for index, parent in enumerate(draft.parents)
        )
        trial = honest_children(p, replace(draft, parents=parents), node, uniforms)
        if trial.accepted is not None:
            break
    return trial


def keeping_the_rejected(q, ids, token):
    """q of the next sibling as if it had been drawn with replacement."""
    return q


def drawn_with_replacement(logits, params, count, uniforms, head_ids):
    parts = [honest_draw(logits, params, 1, uniforms[:, j : j + 1], head_ids) for j in range(count)]
    rows = zip(*(part.siblings for part in parts), strict=True)
    merged = [Siblings(*([v for s in row for v in s[i]] for i in range(3))) for row in rows]
    return tree_drafter.DrawnChildren(merged, parts[0].q)


def ranked_by_its_own_probability(self, parent, siblings, honest=CandidateTree._add):
    """What an EAGLE-2 that samples would do: the priority knows the token that was drawn."""
    honest(self, parent, siblings._replace(best=siblings.likelihoods))


def test_siblings_judged_apart_by_hand(monkeypatch):
    # After 2 was rejected (.5): 0 is accepted by p, 1 (.5) with .4 / .2 > 1 of q (.2, .2, .6).
    monkeypatch.setattr(sampling, "_try_children", each_alone)
    assert first_token() == pytest.approx([0.2 + 0.25, 0.2 + 0.25, 0.1], abs=1e-9)


def test_a_q_that_keeps_the_rejected_by_hand(monkeypatch):
    # After 2 was rejected (.5): 0 and 1 (.5 each) are judged by .2 instead of .5: all accepted.
    monkeypatch.setattr(sampling, "without", keeping_the_rejected)
    assert first_token() == pytest.approx([0.45, 0.45, 0.1], abs=1e-9)


def test_a_cut_by_the_drawn_tokens_own_probability_by_hand(monkeypatch):
    # Two draws, the likelier one is kept: {2, other} keep 2. Pairs in order: (0, 1) and (1, 0)
    # (.2 * .25 each) keep the elder, all others (.9) keep 2. 2 is accepted with 1/6; else 0 (.6)
    # or 1 (.4) is emitted.
    case = replace(BY_HAND, tree=TreePlan.dynamic(nodes=1, depth=1, branching=2))
    assert check_case(case).exact
    monkeypatch.setattr(CandidateTree, "_add", ranked_by_its_own_probability)
    rejected = 0.9 * 5 / 6
    expected = [0.05 + rejected * 0.6, 0.05 + rejected * 0.4, 0.9 / 6]
    assert first_token(case) == pytest.approx(expected, abs=1e-9)


BROKEN = {
    "siblings judged apart": (sampling, "_try_children", each_alone),
    "q keeps the rejected": (sampling, "without", keeping_the_rejected),
    "drawn with replacement": (tree_drafter, "draw_children", drawn_with_replacement),
    "cut by the token's own probability": (CandidateTree, "_add", ranked_by_its_own_probability),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_trees_are_seen(name, monkeypatch):
    plan = TreePlan(children=(2, 1), fed=1, kept=2) if name.startswith("cut") else STATIC
    assert check_case(case_of(plan)).exact
    monkeypatch.setattr(*BROKEN[name])
    result = check_case(case_of(plan))
    assert not result.exact
    assert result.error > 1e-3


def test_a_tree_of_the_wrong_rows_is_seen(monkeypatch):
    """Rows of the logits shifted from each node to the next."""

    def shifted(logits, draft, params, uniforms):
        return sampling.verify(logits.roll(1, 0), draft, params, uniforms)

    assert check_case(case_of(STATIC)).exact
    assert check_case(case_of(STATIC), shifted).error > 1e-3
