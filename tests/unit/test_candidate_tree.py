"""Which candidates a tree feeds and keeps, on numbers small enough to check by eye."""

from impl.engine.candidate_tree import CandidateTree, Siblings, TreePlan
from impl.engine.token_tree import ROOT


def ranked(*pairs):
    """The likeliest tokens: what is best before each draw is its own likelihood."""
    tokens, likelihoods = zip(*pairs, strict=True)
    return Siblings(tokens, likelihoods, likelihoods)


def tree(nodes=4, depth=3, branching=2, limit=9):
    return CandidateTree(TreePlan.dynamic(nodes=nodes, depth=depth, branching=branching), limit)


def test_it_feeds_the_likeliest_nodes_of_a_level_and_keeps_the_best_of_all():
    grown = tree(nodes=4)
    assert (grown.frontier, grown.wanted) == ([ROOT], 2)
    grown.extend([ranked((7, 0.6), (8, 0.3))])
    assert grown.frontier == [0, 1]
    # joint: .54 and .06 behind 7, .15 and .12 behind 8; the best four of six
    grown.extend([ranked((1, 0.9), (2, 0.1)), ranked((3, 0.5), (4, 0.4))])
    assert grown.frontier == [2, 4]
    assert [grown.tokens[node] for node in grown.frontier] == [1, 3]
    grown.extend([ranked((5, 0.8), (6, 0.2)), ranked((5, 0.5), (6, 0.5))])
    assert grown.frontier == []
    found = grown.finish()
    # .6, .3, .54, .432; the others have at most .15
    assert found.tokens == (7, 8, 1, 5)
    assert found.parents == (ROOT, ROOT, 0, 2)
    assert found.sources == (0, 0, 1, 3)


def test_a_node_that_will_be_cut_is_not_fed():
    grown = tree(nodes=1)
    grown.extend([ranked((7, 0.6), (8, 0.3))])
    assert grown.frontier == [0]
    grown.extend([ranked((1, 0.9), (2, 0.1))])
    assert grown.frontier == []  # .54 stands behind .6: no candidate of level 2 will be kept
    assert grown.finish().tokens == (7,)


def test_a_draw_is_ranked_by_what_was_likeliest_before_it():
    grown = tree(nodes=2)
    # an unlikely token came first, then the likeliest: both stand where it could have stood
    grown.extend([Siblings((9, 7), (0.1, 0.6), (0.6, 0.6))])
    assert grown.frontier == [0, 1]
    grown.extend([ranked((1, 0.9)), ranked((2, 0.9))])
    assert grown.finish().tokens == (9, 7)


def test_earlier_candidates_come_first_on_a_tie():
    grown = tree(nodes=3, branching=2)
    grown.extend([ranked((7, 1.0))])
    grown.extend([ranked((1, 0.5), (2, 0.5))])
    grown.extend([ranked((3, 1.0)), ranked((4, 1.0))])
    assert grown.finish().tokens == (7, 1, 2)


def test_a_limit_on_the_depth():
    grown = tree(limit=1)
    grown.extend([ranked((7, 0.6), (8, 0.3))])
    assert grown.frontier == []
    assert tree(limit=0).frontier == []
    assert tree(limit=0).finish().tokens == ()


def test_a_static_tree_keeps_everything():
    grown = CandidateTree(TreePlan.static([2, 1]), 9)
    grown.extend([Siblings((7, 8), (0.9, 1e-9), (0.9, 0.1))])
    assert (grown.frontier, grown.wanted) == ([0, 1], 1)
    grown.extend([ranked((1, 0.9)), ranked((2, 0.1))])
    assert grown.finish() == ((0, 1, 2, 3), (7, 8, 1, 2), (ROOT, ROOT, 0, 1), (0, 0, 1, 2))
