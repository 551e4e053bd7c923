"""Prompt lookup decoding on models of known logits: always, never and sometimes accepted."""

import pytest
from fixed_logits import Counting, Hashed, Pair, decode, emitted, greedy_text

from harness.decoder import FinishReason, Request, SamplingParams
from harness.errors import UsageError
from harness.registry import decoder_options

CYCLE = Counting(4)  # 0, 1, 2, 3, 0, ...


PLAIN = SamplingParams()


def rounds(rule, vocab, prompt, max_new_tokens, sampling=PLAIN, **options):
    decoder = Pair.of(rule, rule, vocab).ngram(**options)
    request = Request("a", prompt, max_new_tokens, sampling)
    log = decode(decoder, [request])["a"]
    assert log[-1].finish is FinishReason.LENGTH
    return [(r.tokens, r.drafted, r.accepted) for r in log]


def test_a_text_that_repeats_itself_is_always_accepted():
    # 0 occurred before, with 1 2 3 behind it; then the period goes on
    assert rounds(CYCLE, 4, (0, 1, 2, 3, 0), 12, lookahead=5) == [
        ((1, 2, 3, 0, 1, 2), 5, 5),
        ((3, 0, 1, 2, 3, 0), 5, 5),
    ]


def test_a_text_without_repeats_is_autoregressive_decoding():
    assert rounds(Counting(10), 10, (0,), 3) == [((1,), 0, 0), ((2,), 0, 0), ((3,), 0, 0)]


def test_a_prompt_that_misleads_is_never_accepted():
    # 5 was followed by 0 0, 6 and 7 by nothing yet; the target counts on
    assert rounds(Counting(10), 10, (5, 0, 0, 5), 3, lookahead=2) == [
        ((6,), 2, 0),
        ((7,), 0, 0),
        ((8,), 0, 0),
    ]


def test_a_prompt_that_is_right_for_a_while_is_sometimes_accepted():
    # behind 2: 3 4 9 of which 3 4 are right
    assert rounds(Counting(10), 10, (2, 3, 4, 9, 2), 6, lookahead=3) == [
        ((3, 4, 5), 3, 2),
        ((6,), 0, 0),
        ((7,), 0, 0),
        ((8,), 0, 0),
    ]


def test_shorter_matches_can_be_left_alone():
    prompt = (2, 3, 4, 9, 1, 2)
    assert rounds(Counting(10), 10, prompt, 2, lookahead=1, min_match=2) == [
        ((3,), 0, 0),
        ((4,), 0, 0),  # 2 3 occurred, but one token is left: nothing to draft
    ]
    assert rounds(Counting(10), 10, prompt, 2, lookahead=1) == [((3, 4), 1, 1)]


def test_a_draft_is_no_longer_than_what_may_still_be_emitted():
    assert rounds(CYCLE, 4, (0, 1, 2, 3, 0), 3, lookahead=5) == [((1, 2, 3), 2, 2)]


def test_at_temperature_1_a_copied_token_is_accepted_by_its_own_probability():
    """The target says 0 or 1 evenly, so half of the copied tokens are accepted."""

    class Coin:
        def __call__(self, tokens):
            return [0.0, 0.0]

    pair = Pair.of(Coin(), Coin(), 2, batch_size=16)
    requests = [
        Request(f"r{i}", (0, 1, 0, 0, 1, 1), 40, SamplingParams(1.0, seed=5)) for i in range(48)
    ]
    log = decode(pair.ngram(lookahead=1), requests)
    drafted = [r for own in log.values() for r in own if r.drafted]
    share = sum(r.accepted for r in drafted) / len(drafted)
    assert len(drafted) > 1000
    assert abs(share - 0.5) < 4 * 0.5 / len(drafted) ** 0.5  # 4 standard errors


def test_a_slot_that_changes_hands_forgets_the_text_before():
    target = Hashed(8, 1)
    requests = [Request(f"r{i}", ((i * 3) % 8, 1), 12) for i in range(5)]
    decoder = Pair.of(target, target, 8, batch_size=2).ngram()
    texts = {request.request_id: greedy_text(target, request) for request in requests}
    assert emitted(decode(decoder, requests)) == texts
    assert decoder.indices == {}


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="ngram: min_match: must be at most max_match, 3"):
        decoder_options("ngram", {"min_match": 4})
