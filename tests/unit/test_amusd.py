"""AMUSD round by round, on models of known logits; its draft works in this process.

The target counts 1, 2, 3, ...; the draft counts along ("always"), skips ("never"), or errs once
("sometimes"). `beside` is how many draft passes fit beside one target pass.
"""

import pytest
from fixed_logits import Counting, Pair, Scripted, decode

from harness.decoder import FinishReason, Request, SamplingParams, Span, SpanKind
from impl.engine.chain import Drafted, DraftedToken

COUNT = Counting(10)
SKIP = Counting(10, step=2)


def request(prompt=(0,), max_new_tokens=9, name="a", **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


def errs_at(*lengths):
    """Counts from (0,), but takes 0 for the next token behind texts of these lengths."""
    return Scripted(10, tuple((0,) if n in lengths else (n,) for n in range(10)))


def rounds_of(draft, request=None, batch_size=1, **options):
    request = request or globals()["request"]()
    with Pair.of(COUNT, draft, 10, batch_size=batch_size).amusd(**options) as decoder:
        return decode(decoder, [request])[request.request_id]


def summary(rounds):
    return [(r.tokens, r.drafted, r.accepted) for r in rounds]


def test_always_right_and_three_tokens_beside_each_pass():
    # Waits for token 1 and verifies it; 2, 3, 4 come meanwhile: 2 is judged with it, 3 and 4 are
    # fed next and 5 is judged with them, 6 and 7 wait, ...; 9 is the bonus token, not drafted.
    rounds = rounds_of(COUNT, beside=3)
    assert summary(rounds) == [((1, 2), 2, 2), ((3, 4, 5), 3, 3), ((6, 7, 8), 3, 3), ((9,), 0, 0)]
    assert rounds[-1].finish is FinishReason.LENGTH


def test_always_right_and_nothing_beside_a_pass():
    # The token behind the verified one is never there in time: the target emits its own.
    rounds = rounds_of(COUNT, request(max_new_tokens=5), beside=0)
    assert summary(rounds) == [((1, 2), 1, 1), ((3, 4), 1, 1), ((5,), 0, 0)]


def test_never_right_rolls_back_every_time():
    rounds = rounds_of(SKIP, request(max_new_tokens=4), beside=3)
    assert summary(rounds) == [((1,), 2, 0), ((2,), 2, 0), ((3,), 1, 0), ((4,), 0, 0)]


def test_right_but_for_the_fourth_token():
    # 3, 0 are fed and 0+1 is judged with them: 3 is accepted, 4 is emitted in the place of 0; what
    # was drafted behind 0 is dropped.
    rounds = rounds_of(errs_at(4), beside=3)
    assert summary(rounds)[:2] == [((1, 2), 2, 2), ((3, 4), 3, 1)]
    # 5 is fed, 6, 7, 8 come meanwhile, the last that are worth drafting: 9 is the bonus token.
    assert summary(rounds)[2:] == [((5, 6), 2, 2), ((7, 8, 9), 2, 2)]


def test_the_fed_tokens_are_accepted_and_the_one_drafted_beside_them_is_not():
    rounds = rounds_of(errs_at(5), request(max_new_tokens=6), beside=3)
    assert summary(rounds) == [((1, 2), 2, 2), ((3, 4, 5), 3, 2), ((6,), 0, 0)]


def test_no_more_than_the_maximum_is_fed():
    rounds = rounds_of(COUNT, beside=5, max_verified=2)
    assert [r.drafted for r in rounds] == [2, 3, 3, 0]


def test_a_fixed_number_of_tokens_whatever_the_clock():
    for beside in (0, 1, 5):
        rounds = rounds_of(COUNT, beside=beside, max_verified=2, fixed=True)
        assert summary(rounds) == [
            ((1, 2, 3), 3, 3), ((4, 5, 6), 3, 3), ((7, 8, 9), 2, 2)
        ]  # fmt: skip


def test_deterministic_fixes_the_number():
    pair = Pair.of(COUNT, COUNT, 10, deterministic=True)
    with pair.amusd(beside=0, max_verified=2) as decoder:
        assert [r.drafted for r in decode(decoder, [request()])["a"]] == [3, 3, 2]


@pytest.mark.parametrize("ahead", [2, 4])
def test_the_draft_goes_no_further_ahead_than_there_are_rows_for(ahead):
    with Pair.of(COUNT, COUNT, 10).amusd(max_ahead=ahead, max_verified=1, beside=99) as decoder:
        decoder.start([request(max_new_tokens=30)])
        decoder.step()  # 1 is fed, 2 is judged with it
        assert len(decoder.draft.chains["a"].tokens) == ahead
        decoder.step()
        assert len(decoder.draft.chains["a"].tokens) == ahead + 2


def test_a_chain_ends_behind_an_end_of_sequence_token():
    ending = request(eos_token_ids=frozenset({3}))
    rounds = rounds_of(COUNT, ending, beside=9)
    assert summary(rounds) == [((1, 2), 2, 2), ((3,), 1, 1)]
    assert rounds[-1].finish is FinishReason.EOS


def test_an_end_that_the_target_does_not_want_is_replaced():
    ending = request(eos_token_ids=frozenset({0}), max_new_tokens=5)
    rounds = rounds_of(errs_at(3), ending, beside=9)
    assert summary(rounds) == [((1, 2), 2, 2), ((3,), 1, 0), ((4, 5), 1, 1)]


def test_tokens_still_on_their_way_when_the_draft_rolled_back_are_dropped():
    with Pair.of(COUNT, errs_at(2), 10).amusd(beside=0) as decoder:
        decoder.start([request()])
        decoder.step()  # 1 is accepted, 2 emitted
        client = decoder.draft
        old, new = client.chains["a"].number - 1, client.chains["a"].number
        span = Span(SpanKind.SPECULATE, 0, 2)
        for number, token in ((old, 0), (old, 7), (new, 3)):
            client._take(Drafted((DraftedToken("a", number, token),), span, 1, ()))
        assert client.chains["a"].tokens == [3]
        client._take(Drafted((DraftedToken("gone", old, 1),), span, 1, ()))


def test_a_batch_waits_for_its_latest_sequence_and_each_goes_its_own_way():
    pair = Pair.of(COUNT, errs_at(2), 10, batch_size=2)
    requests = [request(max_new_tokens=5), request((0, 1, 2, 3), 5, "b")]
    with pair.amusd(beside=1) as decoder:
        log = decode(decoder, requests)
    assert summary(log["a"]) == [((1, 2), 2, 1), ((3, 4), 2, 2), ((5,), 0, 0)]
    assert summary(log["b"]) == [((4, 5), 2, 2), ((6, 7), 2, 2), ((8,), 0, 0)]


def test_where_the_time_went():
    (first, *_) = rounds_of(COUNT, beside=2)
    kinds = [span.kind for span in first.spans]
    # Waits until the draft listens, receives and draws; what was drafted beside the pass is there.
    # Last, the draft is told.
    assert kinds == [SpanKind.SPECULATE] * 3 + [
        SpanKind.WAIT, SpanKind.TRANSFER, SpanKind.WAIT, SpanKind.TRANSFER, SpanKind.VERIFY,
        SpanKind.TRANSFER, SpanKind.VERIFY, SpanKind.TRANSFER,
    ]  # fmt: skip


def test_at_temperature_1_nothing_impossible_is_emitted():
    sure = Scripted(4, tuple((n % 4,) for n in range(9)))  # e^-100 for all others: 0 in float32
    sampled = request(max_new_tokens=5, sampling=SamplingParams(1.0))
    with Pair.of(sure, Counting(4, step=2), 4).amusd(beside=2) as decoder:
        rounds = decode(decoder, [sampled])["a"]
    assert [t for r in rounds for t in r.tokens] == [1, 2, 3, 0, 1]
