"""Tree speculation on models of known logits: rounds worked out by hand, caches, limits.

The target counts 0, 1, 2, 3, 0, ... The draft's next token depends on the last one only.
"""

import pytest
import torch
from fixed_logits import Counting, Hashed, Markov, Pair, decode, emitted, greedy_text

from baselines.tree import MOST_NODES, TreeOptions
from harness.decoder import FinishReason, Request, SamplingParams
from harness.errors import NonFiniteLogitsError, UsageError
from harness.registry import decoder_options
from impl.engine.tree_drafter import draw_children

COUNT = Counting(4)
RIGHT = Markov(((0, 0.6, 0.4, 0), (0, 0, 0.7, 0.3), (0.2, 0, 0, 0.8), (0.9, 0.1, 0, 0)))
WRONG = Markov(((0, 0, 0.6, 0.4), (0.6, 0, 0, 0.4), (0.6, 0.4, 0, 0), (0, 0, 0.6, 0.4)))
# Its second choice is the right one behind 1, its first elsewhere.
SOMETIMES = Markov(((0, 0.6, 0.4, 0), (0.5, 0, 0.3, 0.2), (0, 0, 0.3, 0.7), (0.9, 0.1, 0, 0)))
COIN = SamplingParams(temperature=1.0, seed=3)


def request(max_new_tokens=6, name="a", **settings):
    return Request(name, (0,), max_new_tokens, **settings)


def rounds_of(draft, max_new_tokens, **options):
    log = decode(Pair.of(COUNT, draft, 4).tree(**options), [request(max_new_tokens)])
    return [(r.tokens, r.drafted, r.accepted) for r in log["a"]]


# --- greedy, round by round ----------------------------------------------------------------------


def test_a_draft_that_is_always_right():
    # Joint probabilities .6 .42 .336 along 1, 2, 3 and .4 for 2 at first: the best four.
    # The second round may draft two levels: .9 (0), .54 (0, 1), .36 (0, 2), .1 (1).
    rounds = rounds_of(RIGHT, 7, nodes=4, depth=3, branching=2)
    assert rounds == [((1, 2, 3, 0), 4, 3), ((1, 2, 3), 4, 2)]


def test_a_draft_that_is_never_right():
    # Two candidates on the only level of the third round, and no use for any in the last.
    rounds = rounds_of(WRONG, 4, nodes=4, depth=3, branching=2)
    assert rounds == [((1,), 4, 0), ((2,), 4, 0), ((3,), 2, 0), ((0,), 0, 0)]


def test_a_draft_that_is_sometimes_right_at_first_choice_only():
    # 1: .6, 2: .4, (1, 0): .3, (2, 3): .28 are the best four; (1, 2) with .18 is cut. Behind 2:
    # 3: .7, (3, 0): .63, (3, 0, 1): .378, 2: .3.
    rounds = rounds_of(SOMETIMES, 6, nodes=4, depth=3, branching=2)
    assert rounds == [((1, 2), 4, 1), ((3, 0, 1, 2), 4, 3)]


def test_a_second_choice_is_accepted_when_its_elder_sibling_is_not():
    # Six nodes keep (1, 2) with .18, which stands before (1, 0, 1) with the same. Behind 3:
    # 0: .9, (0, 1): .54, (0, 2): .36, (0, 1, 0): .27, (0, 2, 3): .252, (0, 1, 2): .162.
    rounds = rounds_of(SOMETIMES, 7, nodes=6, depth=3, branching=2)
    assert rounds == [((1, 2, 3), 6, 2), ((0, 1, 2, 3), 6, 3)]


def test_a_static_tree_keeps_every_node():
    # Behind 0: 1, 2, and two behind each: accepted 1, 2. Behind 3 one level is enough: 0, 1.
    rounds = rounds_of(SOMETIMES, 5, shape=[2, 2])
    assert rounds == [((1, 2, 3), 6, 2), ((0, 1), 2, 1)]


def test_a_node_has_no_more_children_than_the_draft_has_tokens_for_it():
    # Two tokens have any probability behind 0, two behind each of them.
    assert rounds_of(RIGHT, 3, shape=[4, 4])[0] == ((1, 2, 3), 4 + 2, 2)


def test_the_end_of_a_text():
    log = decode(Pair.of(COUNT, RIGHT, 4).tree(), [request(eos_token_ids=frozenset({2}))])
    assert emitted(log)["a"] == (1, 2)
    assert log["a"][-1].finish is FinishReason.EOS


def test_rounds_hold_both_spans_and_no_cache():
    (only,) = decode(Pair.of(COUNT, RIGHT, 4).tree(), [request(2)])["a"]
    assert [span.kind for span in only.spans] == ["draft", "verify"]
    assert (only.cache, only.backup, only.guesses) == (None, None, None)


# --- against AR and SD ---------------------------------------------------------------------------

TREES = [
    {"nodes": 8, "depth": 4, "branching": 2},
    {"nodes": 3, "depth": 5, "branching": 3},
    {"shape": [3, 2, 1]},
]


@pytest.mark.parametrize("options", TREES, ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_greedy_output_is_the_targets_whatever_the_tree(options, batch_size):
    target, draft = Hashed(16, 1), Hashed(16, 2)
    requests = [Request(f"r{i}", (i + 1,) * (i % 5 + 1), 4 + 5 * (i % 4)) for i in range(9)]
    pair = Pair.of(target, draft, 16, batch_size=batch_size)
    log = decode(pair.tree(**options), requests)
    assert emitted(log) == {r.request_id: greedy_text(target, r) for r in requests}
    later = [r for rounds in log.values() for r in rounds if 0 < r.accepted < r.drafted]
    assert len(later) > 5  # paths that are neither empty nor the whole tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{"nodes": 4, "branching": 1}, {"shape": [1, 1, 1, 1]}])
def test_a_tree_without_siblings_is_sd_round_by_round(temperature, options):
    params = SamplingParams(temperature, seed=3)
    requests = [Request(f"r{i}", (i + 1,), 5 + 3 * i, params) for i in range(6)]
    pair = Pair.of(Hashed(16, 1), Hashed(16, 2), 16, batch_size=2)
    chain = decode(pair.sd(4), requests)
    tree = decode(pair.tree(**options), requests)

    def facts(log):
        return {k: [(r.tokens, r.drafted, r.accepted) for r in v] for k, v in log.items()}

    assert facts(tree) == facts(chain)
    assert len({r.accepted for rounds in chain.values() for r in rounds}) > 2


def test_sampled_output_does_not_depend_on_the_batch():
    requests = [Request(f"r{i}", (i + 1,), 12, COIN) for i in range(7)]
    logs = [
        decode(Pair.of(Hashed(16, 1), Hashed(16, 2), 16, batch_size=size).tree(), requests)
        for size in (1, 2, 7)
    ]
    assert emitted(logs[0]) == emitted(logs[1]) == emitted(logs[2])


@pytest.mark.parametrize("candidates", ["sampled", "likeliest"])
def test_at_temperature_1_nothing_is_accepted_that_the_target_cannot_say(candidates):
    sure = Markov(((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0)))
    pair = Pair.of(sure, SOMETIMES, 4)
    log = decode(pair.tree(candidates=candidates), [request(9, sampling=COIN)])
    assert emitted(log)["a"] == (1, 2, 3, 0, 1, 2, 3, 0, 1)


# --- drawing -------------------------------------------------------------------------------------

LOGITS = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]]).double().log()


def test_siblings_are_drawn_without_replacement():
    # .6 lies in [.5, 1): token 2. Of (.2, .3) left the point .3 lies in [.2, .5): token 1.
    drawn = draw_children(LOGITS, COIN, 3, torch.tensor([[0.6, 0.6, 0.6]] * 2).numpy(), None)
    first, second = drawn.siblings
    assert first.tokens == [2, 1, 0]
    assert first.likelihoods == pytest.approx([0.5, 0.3, 0.2])
    assert first.best == pytest.approx([0.5, 0.3, 0.2])
    assert second.tokens == [1]  # nothing else is possible
    assert drawn.q[0].tolist() == pytest.approx([0.2, 0.3, 0.5])


def test_what_was_likeliest_before_a_draw_does_not_depend_on_it():
    first, _ = draw_children(
        LOGITS, COIN, 3, torch.tensor([[0.0, 0.0, 0.0]] * 2).numpy(), None
    ).siblings
    assert first.tokens == [0, 1, 2]
    assert first.best == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize("params", [SamplingParams(0.0), COIN])
def test_without_random_numbers_the_likeliest_tokens_are_point_masses(params):
    drawn = draw_children(LOGITS, params, 2, None, torch.tensor([10, 20, 30]))
    assert [s.tokens for s in drawn.siblings] == [[30, 20], [20]]
    assert drawn.q is None


# --- errors and options --------------------------------------------------------------------------


def test_not_finite_draft_logits_name_the_sequence_and_the_position():
    nan = float("nan")
    draft = Markov(((0, 1, 0, 0), (nan,) * 4, (0, 0, 0, 1), (1, 0, 0, 0)))
    decoder = Pair.of(COUNT, draft, 4).tree()
    decoder.start([request()])
    with pytest.raises(NonFiniteLogitsError, match=r"request a, output position 1: draft .*NaN"):
        decoder.step()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "tree.nodes"),
        ({"shape": []}, "tree.shape.*at least one level"),
        ({"shape": [4, 0]}, "tree.shape"),
        ({"shape": [8, 8, 8]}, rf"tree.shape.*584 nodes; at most {MOST_NODES}"),
        ({"candidates": "best"}, "tree.candidates"),
    ],
)
def test_options_out_of_range_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        decoder_options("tree", values)


def test_the_plan_of_each_kind():
    dynamic = TreeOptions(nodes=8, depth=3, branching=2).plan()
    assert (dynamic.children, dynamic.fed, dynamic.kept) == ((2, 2, 2), 2, 8)
    assert (dynamic.scratch, dynamic.draws) == (4, 2 * (1 + 2 + 2))
    static = TreeOptions(shape=[4, 2, 2, 1]).plan()
    assert (static.children, static.kept) == ((4, 2, 2, 1), 4 + 8 + 16 + 16)
    assert (static.scratch, static.draws) == (4 + 8 + 16, 4 + 8 + 16 + 16)
