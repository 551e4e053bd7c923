"""PEARL round by round, on models of known logits; its draft works in this process.

The target counts 1, 2, 3, ...; the draft counts along ("always"), skips ("never"), or errs
("sometimes"). A round is (emitted, drafted, accepted).
"""

import itertools

import pytest
from fixed_logits import Counting, Pair, Scripted, decode

from baselines.pearl import FIRST_LOOKAHEAD, MAX_AUTO_LOOKAHEAD, SpeedRatio
from harness.decoder import FinishReason, Request, SamplingParams, Span, SpanKind

COUNT = Counting(10)
SKIP = Counting(10, step=2)


def request(prompt=(0,), max_new_tokens=9, name="a", **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


def errs_at(*lengths):
    """Counts from (0,), but takes 0 for the next token behind texts of these lengths."""
    return Scripted(10, tuple((0,) if n in lengths else (n,) for n in range(10)))


def rounds_of(draft, request=None, lookahead=3, beside=0, **options):
    request = request or globals()["request"]()
    with Pair.of(COUNT, draft, 10).pearl(lookahead=lookahead, beside=beside, **options) as decoder:
        return decode(decoder, [request])[request.request_id]


def summary(rounds):
    return [(r.tokens, r.drafted, r.accepted) for r in rounds]


@pytest.mark.parametrize("beside", [0, 1, 3, 9])
def test_always_right_whatever_fits_beside_a_pass(beside):
    # Pre-verify: 1, of the block 1 2 3. Post-verify: 2 3 and the next block's 4; 5 6 and 7. Of the
    # third block 7 8 are worth drafting: 9 is the target's own.
    rounds = rounds_of(COUNT, beside=beside)
    assert summary(rounds) == [
        ((1,), 1, 1), ((2, 3, 4), 3, 3), ((5, 6, 7), 3, 3), ((8, 9), 1, 1)
    ]  # fmt: skip
    assert rounds[-1].finish is FinishReason.LENGTH


def test_never_right_stays_in_pre_verify():
    rounds = rounds_of(SKIP, request(max_new_tokens=4), beside=3)
    assert summary(rounds) == [((1,), 1, 0), ((2,), 1, 0), ((3,), 1, 0), ((4,), 0, 0)]


def test_a_rejection_in_post_verify_goes_back_to_pre_verify():
    # Block 1 2 0: 1 is pre-verified, 2 accepted, 3 emitted in the place of 0; the block behind 0 is
    # dropped. Block 4 5 6: pre-verify 4, then 5 6 and the next block's 7; 8 is left, and 9.
    rounds = rounds_of(errs_at(3))
    assert summary(rounds) == [
        ((1,), 1, 1), ((2, 3), 3, 1), ((4,), 1, 1), ((5, 6, 7), 3, 3), ((8, 9), 1, 1)
    ]  # fmt: skip


def test_the_next_blocks_first_token_is_rejected_and_this_block_kept():
    # 2 3 are accepted, and 4 emitted in the place of the next block's 0.
    rounds = rounds_of(errs_at(4), request(max_new_tokens=5))
    assert summary(rounds) == [((1,), 1, 1), ((2, 3, 4), 3, 2), ((5,), 0, 0)]


def test_blocks_of_one_token_are_all_pre_verified():
    rounds = rounds_of(COUNT, request(max_new_tokens=4), lookahead=1)
    assert summary(rounds) == [((1,), 1, 1), ((2,), 1, 1), ((3,), 1, 1), ((4,), 0, 0)]


def test_an_end_of_sequence_token_ends_its_block():
    rounds = rounds_of(COUNT, request(eos_token_ids=frozenset({2})))
    assert summary(rounds) == [((1,), 1, 1), ((2,), 1, 1)]
    assert rounds[-1].finish is FinishReason.EOS


def test_an_end_that_the_target_does_not_want_is_replaced():
    ending = request(eos_token_ids=frozenset({0}), max_new_tokens=4)
    rounds = rounds_of(errs_at(2), ending)
    assert summary(rounds) == [((1,), 1, 1), ((2,), 1, 0), ((3,), 1, 1), ((4,), 0, 0)]


def test_sequences_of_a_batch_switch_each_for_itself():
    pair = Pair.of(COUNT, errs_at(2), 10, batch_size=2)
    requests = [request(max_new_tokens=5), request((0, 1, 2, 3), 5, "b")]
    with pair.pearl(lookahead=2, beside=2) as decoder:
        log = decode(decoder, requests)
    # a: block 1 0 fails at its second token, then 3 4; b: blocks 4 5, 6 7.
    assert summary(log["a"]) == [((1,), 1, 1), ((2,), 2, 0), ((3,), 1, 1), ((4, 5), 1, 1)]
    assert summary(log["b"]) == [((4,), 1, 1), ((5, 6), 2, 2), ((7, 8), 1, 1)]


def test_the_next_block_is_drafted_beside_the_pass_over_this_one():
    with Pair.of(COUNT, COUNT, 10).pearl(lookahead=3, beside=3) as decoder:
        decoder.start([request()])
        decoder.step()
        assert decoder.draft.chains["a"].tokens == [1, 2, 3]
        kinds = [span.kind for span in decoder.step()[0].spans]
        assert decoder.draft.chains["a"].tokens == [1, 2, 3, 4, 5, 6]
    assert kinds == [SpanKind.SPECULATE] * 3 + [
        SpanKind.WAIT, SpanKind.VERIFY, SpanKind.TRANSFER, SpanKind.VERIFY, SpanKind.TRANSFER
    ]  # fmt: skip


def test_at_temperature_1_a_pre_verified_token_is_not_accepted_unless_the_target_can_say_it():
    sure = Scripted(4, tuple((n % 4,) for n in range(9)))  # e^-100 for all others: 0 in float32
    sampled = request(max_new_tokens=5, sampling=SamplingParams(1.0))
    with Pair.of(sure, Counting(4, step=2), 4).pearl(lookahead=2) as decoder:
        rounds = decode(decoder, [sampled])["a"]
    assert [t for r in rounds for t in r.tokens] == [1, 2, 3, 0, 1]


# --- the length of a block ------------------------------------------------------------------------


def lasting(kind, *milliseconds):
    return [Span(kind, 0, round(1e6 * each)) for each in milliseconds]


@pytest.mark.parametrize(
    ("target_ms", "draft_ms", "expected"),
    [(100, 20, 5), (100, 30, 3), (10, 30, 1), (100, 1, MAX_AUTO_LOOKAHEAD)],
)
def test_as_many_tokens_as_draft_passes_fit_beside_a_target_pass(target_ms, draft_ms, expected):
    ratio = SpeedRatio()
    (target,) = lasting(SpanKind.VERIFY, target_ms)
    ratio.observe(target, lasting(SpanKind.SPECULATE, draft_ms, draft_ms))
    assert ratio.lookahead() == expected


def test_the_ratio_follows_the_newest_passes_by_a_tenth():
    ratio = SpeedRatio()
    (target,) = lasting(SpanKind.VERIFY, 100)
    ratio.observe(target, lasting(SpanKind.SPECULATE, 10))
    ratio.observe(target, lasting(SpanKind.SPECULATE, 110))  # 10 + 0.1 * 100 = 20
    assert ratio.lookahead() == 5


def test_blocks_whose_length_changes_from_round_to_round(monkeypatch):
    # Lengths 2 4 1 3 are drawn up at rounds 1 to 4: blocks 1 2, 3 4 5 6, 7 and 8, where the text
    # has no use for more; each one's first token is verified with the block before.
    lengths = itertools.cycle((2, 4, 1, 3))
    monkeypatch.setattr(SpeedRatio, "lookahead", lambda _: next(lengths))
    rounds = rounds_of(COUNT, lookahead="auto", beside=1)
    assert summary(rounds) == [
        ((1,), 1, 1), ((2, 3), 2, 2), ((4, 5, 6, 7), 4, 4), ((8,), 1, 1), ((9,), 0, 0)
    ]  # fmt: skip


def test_before_anything_is_measured_and_where_nothing_follows_the_clock():
    assert SpeedRatio().lookahead() == FIRST_LOOKAHEAD
    with Pair.of(COUNT, COUNT, 10, deterministic=True).pearl(lookahead="auto") as decoder:
        rounds = decode(decoder, [request(max_new_tokens=30)])["a"]
    assert [r.drafted for r in rounds[:3]] == [1, FIRST_LOOKAHEAD, FIRST_LOOKAHEAD]
