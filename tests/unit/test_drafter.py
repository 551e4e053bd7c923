"""The drafter against a model of known logits: proposals, q rows, rollback, limits."""

import pytest
import torch
from fixed_logits import Counting, FixedLogits, Markov, NotFinite

from harness.decoder import Request, SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine.drafter import Drafter
from impl.engine.sequence import SequenceSlots

COIN = SamplingParams(temperature=1.0, seed=3)


def start(rule, *requests, vocab=10, head_ids=None):
    """A drafter with these requests prefilled, and their sequences."""
    drafter = Drafter(FixedLogits(rule, vocab, head_ids), len(requests), 32)
    slots = SequenceSlots(len(requests), 32)
    for request in requests:
        drafter.prefill(slots.open(request))
    return drafter, slots.live()


def proposed(drafter, sequences, lookahead):
    return [draft.tokens.tolist() for draft in drafter.propose(sequences, lookahead)]


def test_proposes_its_greedy_continuation_as_point_masses():
    drafter, sequences = start(Counting(10), Request("a", (1, 2, 3), 20))
    (draft,) = drafter.propose(sequences, 4)
    assert (draft.tokens.tolist(), draft.probs) == ([4, 5, 6, 7], None)


def test_each_sequence_drafts_as_far_as_it_may():
    drafter, sequences = start(
        Counting(10), Request("a", (1,), 20), Request("b", (4, 5), 3), Request("c", (9,), 1)
    )
    assert proposed(drafter, sequences, 4) == [[2, 3, 4, 5], [6, 7], []]


@pytest.mark.parametrize("accepted", range(5))
def test_goes_on_from_whatever_was_accepted(accepted):
    drafter, (live,) = start(Counting(10), Request("a", (1, 2), 20))
    draft = proposed(drafter, [live], 4)[0]
    live.append([*draft[:accepted], 0])  # the target says 0 there; its cache checks the rest
    assert proposed(drafter, [live], 4) == [[1, 2, 3, 4]]


def test_goes_on_after_rounds_without_a_draft():
    drafter, (live,) = start(Counting(10), Request("a", (1, 2), 20))
    assert proposed(drafter, [live], 0) == [[]]
    live.append([5])
    assert proposed(drafter, [live], 0) == [[]]
    live.append([7])
    assert proposed(drafter, [live], 2) == [[8, 9]]


def test_a_draft_stops_behind_the_first_unlikely_token():
    # Behind 0: 1 for sure; behind 1: 2 with .7; behind 2: 3 with .6; behind 3: 0 for sure.
    table = ((0, 1, 0, 0), (0.3, 0, 0.7, 0), (0.4, 0, 0, 0.6), (1, 0, 0, 0))

    def draft(stop_below):
        drafter, sequences = start(Markov(table), Request("a", (0,), 20), vocab=4)
        return drafter.propose(sequences, 4, stop_below)[0].tokens.tolist()

    assert [draft(below) for below in (0.0, 0.6)] == [[1, 2, 3, 0], [1, 2, 3, 0]]  # .6 is enough
    assert draft(0.65) == [1, 2, 3]
    assert draft(0.75) == [1, 2]
    assert draft(1.0) == [1, 2]


def test_each_sequence_stops_by_itself_and_goes_on_from_there():
    table = ((0, 1, 0, 0), (0.3, 0, 0.7, 0), (0.4, 0, 0, 0.6), (1, 0, 0, 0))
    drafter, sequences = start(
        Markov(table), Request("a", (1,), 20), Request("b", (3,), 20), vocab=4
    )

    def stopped():
        return [d.tokens.tolist() for d in drafter.propose(sequences, 4, 0.75)]

    assert stopped() == [[2], [0, 1, 2]]
    for sequence, tokens in zip(sequences, ([2, 3], [0, 1, 2, 3]), strict=True):
        sequence.append(tokens)
    assert stopped() == [[0, 1, 2], [0, 1, 2]]


def test_samples_from_the_rows_that_it_reports():
    table = ((0.0, 0.25, 0.75), (0.5, 0.5, 0.0), (1.0, 0.0, 0.0))
    drafter, (live,) = start(Markov(table), Request("a", (0,), 20, COIN), vocab=3)
    (draft,) = drafter.propose([live], 6)
    last = [0, *draft.tokens.tolist()[:-1]]
    assert torch.allclose(draft.probs, torch.tensor([table[token] for token in last]))
    assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.tokens.tolist()))


def test_a_trimmed_head_proposes_target_ids():
    drafter, (live,) = start(
        Counting(10), Request("a", (1,), 20), head_ids=torch.tensor([2, 5, 6, 9])
    )
    (draft,) = drafter.propose([live], 3)
    # 2 is kept; behind 2 and 5 the nearest kept tokens upward are 5 and 6
    assert draft.tokens.tolist() == [2, 5, 6]
    assert draft.ids.tolist() == [2, 5, 6, 9]


def test_a_trimmed_head_reports_the_trimmed_distribution():
    table = ((0.1, 0.2, 0.3, 0.4),) * 4
    drafter, (live,) = start(
        Markov(table), Request("a", (1,), 20, COIN), vocab=4, head_ids=torch.tensor([1, 3])
    )
    (draft,) = drafter.propose([live], 2)
    assert draft.probs.tolist() == [pytest.approx([1 / 3, 2 / 3])] * 2
    assert set(draft.tokens.tolist()) <= {1, 3}


def test_draws_do_not_depend_on_the_batch():
    table = ((0.25, 0.25, 0.25, 0.25),) * 4
    requests = [Request(name, (0,), 20, COIN) for name in "abc"]
    together = proposed(*start(Markov(table), *requests, vocab=4), 8)
    assert together == [
        proposed(*start(Markov(table), request, vocab=4), 8)[0] for request in requests
    ]
    assert len({tuple(tokens) for tokens in together}) == 3  # and are not shared either


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_finite_logits_name_the_sequence_and_the_position(temperature):
    sampling = SamplingParams(temperature=temperature)
    drafter, sequences = start(
        NotFinite(Counting(10), length=5),
        Request("a", (1,), 20, sampling),
        Request("b", (1, 2, 3), 20, sampling),
    )
    # the logits behind 5 tokens choose output token 2 of the request whose prompt has 3
    with pytest.raises(
        NonFiniteLogitsError, match=r"request b, output position 2: draft .*NaN or infinity"
    ):
        drafter.propose(sequences, 4)


def test_the_stand_in_notices_a_stale_cell():
    drafter, (live,) = start(Counting(10), Request("a", (1, 2, 3), 20))
    drafter.cache.memory[0, 0, 0, 0, 1, 1] = 7  # cell 1 holds another position
    with pytest.raises(AssertionError):
        drafter.propose([live], 1)
