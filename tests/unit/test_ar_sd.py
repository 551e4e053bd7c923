"""AR and SD on models of known logits, and what all methods share: stopping, limits, refusals.

The target counts 1, 2, 3, ... In "always" the draft counts along, in "never" it skips, in
"sometimes" it errs once; so every round is known by hand.
"""

import pytest
from fixed_logits import Counting, Hashed, Markov, Pair, Scripted, decode, emitted, greedy_text

from harness.decoder import FinishReason, Request, SamplingParams
from harness.errors import ModelError, RequestError
from impl.engine.models import Models

METHODS = ("ar", "ngram", "sd", "tree", "ssd", "amusd", "pearl")
COUNT = Counting(10)
SKIP = Counting(10, step=2)


def request(prompt=(0,), max_new_tokens=7, name="a", **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


def errs_at(*lengths):
    """Counts from (0,), but takes 9 for the next token behind texts of these lengths."""
    favourites = tuple((9, n) if n in lengths else (n,) for n in range(10))
    return Scripted(10, favourites)


def summary(rounds):
    return [(r.tokens, r.drafted, r.accepted) for r in rounds]


def decode_one(decoder, request):
    return decode(decoder, [request])[request.request_id]


# --- AR and SD, round by round -------------------------------------------------------------------


def test_ar_emits_one_token_a_round():
    rounds = decode_one(Pair.of(COUNT, SKIP, 10).ar(), request(max_new_tokens=3))
    assert summary(rounds) == [((1,), 0, 0), ((2,), 0, 0), ((3,), 0, 0)]
    assert [r.finish for r in rounds] == [None, None, FinishReason.LENGTH]
    assert {(r.cache, r.backup, r.guesses) for r in rounds} == {(None, None, None)}


def test_sd_with_a_draft_that_is_always_right():
    rounds = decode_one(Pair.of(COUNT, COUNT, 10).sd(lookahead=3), request())
    # the second draft is cut to 2: with the bonus token they make the 7
    assert summary(rounds) == [((1, 2, 3, 4), 3, 3), ((5, 6, 7), 2, 2)]
    assert [r.finish for r in rounds] == [None, FinishReason.LENGTH]


def test_sd_with_a_draft_that_is_never_right():
    rounds = decode_one(Pair.of(COUNT, SKIP, 10).sd(lookahead=3), request(max_new_tokens=4))
    assert summary(rounds) == [((1,), 3, 0), ((2,), 2, 0), ((3,), 1, 0), ((4,), 0, 0)]


def test_sd_with_a_draft_that_errs_once():
    rounds = decode_one(Pair.of(COUNT, errs_at(3), 10).sd(lookahead=3), request())
    assert summary(rounds) == [((1, 2, 3), 3, 2), ((4, 5, 6, 7), 3, 3)]


def test_sd_stops_drafting_when_unsure():
    # 1 after 0 for sure, 2 after 1 with .6, 3 after 2 for sure; the target takes 0 instead of 3.
    draft = Markov(((0, 1, 0, 0), (0.4, 0, 0.6, 0), (0, 0, 0, 1), (1, 0, 0, 0)))
    target = Markov(((0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (1, 0, 0, 0)))
    pair = Pair.of(target, draft, 4)

    def rounds(stop_below):
        return summary(decode_one(pair.sd(4, stop_below=stop_below), request(max_new_tokens=6)))

    # at .7 the unsure 2 is still submitted (and accepted), nothing behind it
    assert rounds(0.7) == [((1, 2, 0), 2, 2), ((1, 2, 0), 2, 2)]
    assert rounds(0.0) == [((1, 2, 0), 4, 2), ((1, 2, 0), 2, 2)]


def test_sd_at_temperature_1_never_accepts_what_the_target_cannot_say():
    sure = Scripted(4, tuple(((n % 4),) for n in range(9)))  # e^-100 for all others: 0 in float32
    pair = Pair.of(sure, Counting(4, step=2), 4)
    rounds = decode_one(pair.sd(2), request(max_new_tokens=5, sampling=SamplingParams(1.0)))
    assert [t for r in rounds for t in r.tokens] == [1, 2, 3, 0, 1]


def test_every_sequence_of_a_round_shares_its_spans():
    decoder = Pair.of(COUNT, COUNT, 10, batch_size=2).sd(lookahead=2)
    decoder.start([request(name="a"), request(name="b")])
    first, second = decoder.step()
    assert [span.kind for span in first.spans] == ["draft", "verify"]
    assert first.spans == second.spans
    (drafting, verifying) = first.spans
    assert drafting.start_ns <= drafting.end_ns <= verifying.start_ns <= verifying.end_ns


# --- the same for every method -------------------------------------------------------------------


@pytest.fixture(params=METHODS)
def decode_with(request):
    """Decodes requests by one method; lookahead 3 unless told."""

    def run(pair, requests, lookahead=3):
        with pair.open(request.param, lookahead) as decoder:
            return decode(decoder, requests)

    return run


def test_an_end_of_sequence_token_inside_a_block_ends_there(decode_with):
    log = decode_with(Pair.of(COUNT, COUNT, 10), [request(eos_token_ids=frozenset({2}))])
    assert emitted(log)["a"] == (1, 2)
    assert log["a"][-1].finish is FinishReason.EOS


def test_accepted_counts_what_the_target_accepted_before_the_cut():
    with Pair.of(COUNT, COUNT, 10).open("sd", 3) as decoder:
        (only,) = decode_one(decoder, request(eos_token_ids=frozenset({2})))
    assert (only.tokens, only.drafted, only.accepted) == ((1, 2), 3, 3)


def test_a_stop_sequence_across_two_blocks_ends_there(decode_with):
    log = decode_with(Pair.of(COUNT, COUNT, 10), [request(stop_sequences=((4, 5),))])
    assert emitted(log)["a"] == (1, 2, 3, 4, 5)  # the first block of SD ends in 4
    assert log["a"][-1].finish is FinishReason.STOP


def test_a_stop_sequence_inside_a_block_ends_there(decode_with):
    log = decode_with(Pair.of(COUNT, COUNT, 10), [request(stop_sequences=((9,), (1, 2)))])
    assert emitted(log)["a"] == (1, 2)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("draft", [COUNT, SKIP, errs_at(3)], ids=["always", "never", "sometimes"])
def test_exactly_max_new_tokens_are_emitted_wherever_a_block_ends(decode_with, draft, count):
    log = decode_with(Pair.of(COUNT, draft, 10), [request(max_new_tokens=count)])
    assert emitted(log)["a"] == (1, 2, 3, 4, 5, 6, 7)[:count]
    assert [r.finish for r in log["a"]][-1] is FinishReason.LENGTH
    # never more than a round has use for; a tree drafts rivals besides
    assert all(r.accepted <= r.drafted for r in log["a"])
    assert all(r.accepted < count for r in log["a"])
    assert all(r.drafted == 0 for r in log["a"] if count == 1)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_text_ends_when_it_fills_the_context(decode_with, size):
    pair = Pair.of(COUNT, COUNT, 10, max_context=8)
    log = decode_with(pair, [request(prompt=range(size), max_new_tokens=99)], lookahead=5)
    assert emitted(log)["a"] == tuple(n % 10 for n in range(size, 8))
    assert log["a"][-1].finish is FinishReason.CONTEXT
    assert all(r.accepted <= 8 - size - 1 for r in log["a"])


@pytest.mark.parametrize("size", [0, 8, 9])
def test_a_prompt_without_room_is_refused_and_the_others_go_on(decode_with, size):
    pair = Pair.of(COUNT, COUNT, 10, max_context=8, batch_size=2)
    for method in METHODS:
        with pair.open(method, 3) as decoder:
            decoder.start([request(name="good", max_new_tokens=2)])
            with pytest.raises(RequestError, match="request bad: "):
                decoder.admit(request(prompt=range(size), name="bad"))
            assert [r.request_id for r in decoder.step()] == ["good"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "requests",
    [
        [request(name="good"), request(prompt=(), name="bad")],
        [request(name="good"), request(name="good")],
        [request(name=name) for name in "abc"],
    ],
    ids=["empty prompt", "same name twice", "more than the batch size"],
)
def test_nothing_is_live_after_a_start_that_was_refused(method, requests):
    with Pair.of(COUNT, COUNT, 10, batch_size=2).open(method, 3) as decoder:
        decoder.start([request(name="before")])
        decoder.step()
        with pytest.raises(RequestError):
            decoder.start(requests)
        assert decoder.step() == []
        assert emitted(decode(decoder, [request(name="good")]))["good"] == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_nothing_live_does_nothing(method):
    with Pair.of(COUNT, COUNT, 10).open(method, 3) as decoder:
        assert decoder.step() == []
        decoder.start([request(max_new_tokens=1)])
        decoder.step()
        assert decoder.step() == []  # finished, its slot not yet released


@pytest.mark.parametrize("method", METHODS)
def test_start_drops_what_was_live_and_a_name_may_come_back(method):
    with Pair.of(COUNT, errs_at(3), 10, batch_size=2).open(method, 3) as decoder:
        decoder.start([request(name="a"), request(name="b")])
        decoder.step()
        log = decode(decoder, [request(name="b"), request(prompt=(0, 1, 2), name="a")])
    assert emitted(log) == {"b": (1, 2, 3, 4, 5, 6, 7), "a": (3, 4, 5, 6, 7, 8, 9)}


@pytest.mark.parametrize("method", METHODS)
def test_an_abandoned_sequence_leaves_no_trace(method):
    target, draft = Hashed(16, 1), Hashed(16, 2)
    with Pair.of(target, draft, 16, batch_size=2).open(method, 3) as decoder:
        decoder.start([request(name="a", max_new_tokens=30), request((3, 5), 30, "b")])
        decoder.step()
        decoder.release("a")
        late = request((4, 4, 4, 4), 9, "c")
        decoder.admit(late)
        tokens = [t for _ in range(9) for r in decoder.step() if r.request_id == "c"
                  for t in r.tokens]  # fmt: skip
    assert tuple(tokens) == greedy_text(target, late)


def test_sequences_that_come_and_go_emit_what_they_emit_alone(decode_with):
    target, draft = Hashed(16, 1), Hashed(16, 2)
    requests = [
        request([i + 1] * (i % 5 + 1), 4 + 5 * (i % 4), f"r{i}", eos_token_ids=frozenset({3}))
        for i in range(9)
    ]
    texts = {r.request_id: greedy_text(target, r) for r in requests}
    assert sum(text[-1] == 3 for text in texts.values()) >= 3  # some do end in the middle
    for batch_size in (1, 2, 7):
        log = decode_with(Pair.of(target, draft, 16, batch_size=batch_size), requests, lookahead=4)
        assert emitted(log) == texts


def test_a_context_beyond_the_targets_positions_is_refused():
    with pytest.raises(ModelError, match="max_context: 200000 is beyond the target's 100000"):
        Pair.of(COUNT, COUNT, 10, max_context=200_000).ar()


def test_a_pair_without_a_draft_is_refused_by_the_methods_that_need_one():
    target = Pair.of(COUNT, COUNT, 10).models.target_spec
    pair = Pair(Models(target))
    for decoder in (pair.ar(), pair.ngram()):
        assert decode_one(decoder, request(max_new_tokens=1))
    for method in ("sd", "tree", "ssd", "amusd", "pearl"):
        with pytest.raises(ModelError, match="draft: this pair has no draft"), pair.open(method, 3):
            pass
