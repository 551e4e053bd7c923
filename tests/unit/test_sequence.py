"""Where a sequence stops, how far it may draft, and who holds which slot; worked out by hand."""

import pytest

from harness.decoder import FinishReason, Request
from harness.errors import RequestError
from impl.engine.sequence import Sequence, SequenceSlots


def request(name="a", prompt=(7, 8), max_new_tokens=10, **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


def sequence(max_context=100, **settings):
    return Sequence(request(**settings), slot=0, max_context=max_context)


def test_a_round_without_an_end_is_emitted_whole():
    live = sequence()
    assert live.append([1, 2, 3]) == (1, 2, 3)
    assert (live.tokens, live.output_length, live.finish) == ([7, 8, 1, 2, 3], 3, None)


def test_an_end_of_sequence_token_cuts_the_round_behind_it():
    live = sequence(eos_token_ids=frozenset({2, 9}))
    assert live.append([1, 2, 3, 9]) == (1, 2)
    assert (live.tokens, live.output_length) == ([7, 8, 1, 2], 2)
    assert live.finish is FinishReason.EOS


def test_the_token_limit_cuts_the_round():
    live = sequence(max_new_tokens=2)
    assert live.append([1, 2, 3]) == (1, 2)
    assert live.finish is FinishReason.LENGTH


def test_the_context_cuts_the_round():
    live = sequence(max_context=4)
    assert live.append([1, 2, 3]) == (1, 2)
    assert live.finish is FinishReason.CONTEXT


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"eos_token_ids": frozenset({1}), "stop_sequences": ((1,),)}, FinishReason.EOS),
        ({"stop_sequences": ((1,),), "max_new_tokens": 1}, FinishReason.STOP),
        ({"max_new_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_of_several_ends_at_one_token_what_the_text_says_comes_before_the_limits(settings, reason):
    live = sequence(max_context=3, **settings)
    live.append([1])
    assert live.finish is reason


def test_a_stop_sequence_may_span_two_rounds_and_is_included():
    live = sequence(stop_sequences=((5, 5, 5), (3, 4)))
    assert live.append([1, 2, 3]) == (1, 2, 3)
    assert live.append([4, 5]) == (4,)
    assert live.finish is FinishReason.STOP


def test_a_stop_sequence_does_not_begin_in_the_prompt():
    live = sequence(prompt=(3, 4), stop_sequences=((3, 4), (4, 1), (4,)))
    assert live.append([1, 4]) == (1, 4)  # (4,) alone ends it; (4, 1) had its 4 in the prompt
    assert live.finish is FinishReason.STOP


def test_an_empty_stop_sequence_never_matches():
    live = sequence(stop_sequences=((),))
    live.append([1, 2])
    assert live.finish is None


@pytest.mark.parametrize(
    ("lookahead", "max_context", "max_new_tokens", "limit"),
    [
        (4, 100, 10, 4),  # nothing in the way
        (4, 100, 3, 2),  # 2 accepted and the bonus token make 3
        (4, 100, 1, 0),
        (4, 6, 10, 3),  # 2 of the prompt, 3 accepted, 1 emitted: 6
        (4, 3, 10, 0),
        (0, 100, 10, 0),
    ],
)
def test_drafts_no_more_than_the_round_may_emit_less_one(
    lookahead, max_context, max_new_tokens, limit
):
    live = sequence(max_context=max_context, max_new_tokens=max_new_tokens)
    assert live.draft_limit(lookahead) == limit


def test_the_draft_limit_shrinks_with_what_was_emitted():
    live = sequence(max_new_tokens=6)
    live.append([1, 2, 3])
    assert live.draft_limit(4) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=()), "request a: the prompt is empty"),
        (request(prompt=range(8)), "request a: its prompt of 8 tokens leaves no room in a context"),
        (request(prompt=range(9)), "request a: its prompt of 9 tokens"),
        (request(max_new_tokens=0), "request a: max_new_tokens must be at least 1"),
    ],
)
def test_refuses_what_cannot_be_decoded_and_takes_no_slot(bad, message):
    slots = SequenceSlots(1, max_context=8)
    with pytest.raises(RequestError, match=message):
        slots.open(bad)
    assert slots.all() == []


def test_a_prompt_may_leave_room_for_one_token_only():
    slots = SequenceSlots(1, max_context=8)
    assert slots.open(request(prompt=range(7))).draft_limit(4) == 0


def test_slots_are_reused_and_sequences_listed_in_their_order():
    slots = SequenceSlots(3, max_context=8)
    assert [slots.open(request(name)).slot for name in "abc"] == [0, 1, 2]
    assert slots.close("b").request.request_id == "b"
    assert slots.open(request("d")).slot == 1
    assert [s.request.request_id for s in slots.all()] == ["a", "d", "c"]


def test_a_finished_sequence_keeps_its_slot_but_is_not_live():
    slots = SequenceSlots(2, max_context=8)
    first, second = slots.open(request("a", max_new_tokens=1)), slots.open(request("b"))
    first.append([1])
    assert (slots.live(), slots.all()) == ([second], [first, second])


def test_refuses_one_request_too_many_a_live_name_and_an_unknown_one():
    slots = SequenceSlots(2, max_context=8)
    slots.open(request("a"))
    with pytest.raises(RequestError, match="request a: already live"):
        slots.open(request("a"))
    slots.open(request("b"))
    with pytest.raises(RequestError, match="request c: all 2 slots are taken"):
        slots.open(request("c"))
    with pytest.raises(RequestError, match="request c: not live"):
        slots.close("c")
