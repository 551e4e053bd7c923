"""SSD on models of known logits, its worker stepped by hand: hits, misses, guesses, partial builds.

The target counts 1, 2, 3, ... from the prompt (0,). See `LocalDraft` for who moves when.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fixed_logits import (
    Counting,
    Failing,
    FixedLogitSpec,
    Hashed,
    NotFinite,
    Pair,
    Scripted,
    decode,
    emitted,
    greedy_text,
)

from harness.decoder import CacheOutcome, FinishReason, Request, SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine.models import Models
from impl.ssd import decoder as decoder_module
from impl.ssd.budgeting import Costs, PassTimes
from impl.ssd.policy import Policy

EOS, NEVER = frozenset({15}), frozenset()
HIT, MISS = CacheOutcome.HIT, CacheOutcome.MISS
HASHED = Pair.of(Hashed(16, 1), Hashed(16, 2), 16, batch_size=3)
COUNT = Counting(10)
SKIP = Counting(10, step=2)  # its favourites behind c: c+2, c+3, ..., c+10 = c, c+1


def request(prompt=(0,), max_new_tokens=7, name="a", **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


def errs(favourites):
    """Counts from (0,) but for these favourites, by the length of the text before."""
    return tuple(favourites.get(n, (n,)) for n in range(12))


def run(pair, requests, **options):
    with pair.ssd(**options) as decoder:
        return decode(decoder, requests)


def summary(rounds):
    return [(r.tokens, r.drafted, r.accepted, r.cache, r.guesses) for r in rounds]


# --- hits and misses, round by round -------------------------------------------------------------


def test_a_draft_that_is_always_right_hits_by_the_bonus_token():
    rounds = run(Pair.of(COUNT, COUNT, 10), [request()], lookahead=3, budget=4, fan_out="uniform")[
        "a"
    ]
    assert summary(rounds) == [
        ((1, 2, 3, 4), 3, 3, None, 0),
        ((5, 6, 7), 2, 2, HIT, 4),  # a guess at each of 4 positions; the last one was (3, 4)
    ]
    assert [r.backup for r in rounds] == [None, None]
    assert [r.finish for r in rounds] == [None, FinishReason.LENGTH]


def test_a_draft_whose_guesses_are_never_right_misses_every_time():
    rounds = run(
        Pair.of(COUNT, SKIP, 10), [request(max_new_tokens=5)],
        lookahead=3, budget=4, fan_out="uniform",
    )["a"]  # fmt: skip
    assert summary(rounds) == [
        ((1,), 3, 0, None, 0),
        ((2,), 3, 0, MISS, 4),
        ((3,), 2, 0, MISS, 4),
        ((4,), 1, 0, MISS, 4),
        ((5,), 0, 0, MISS, 4),
    ]
    assert [r.backup for r in rounds] == [None, *["neural"] * 4]


def test_a_large_enough_budget_hits_even_the_last_guess():
    # t* = c+1 is SKIP's least likely of 10 tokens, the 9th guess once c+2 is left out
    options = {"lookahead": 1, "fan_out": "geometric", "acceptance": 0.0}  # all at position 0
    for budget, outcome in ((8, MISS), (9, HIT)):
        rounds = run(
            Pair.of(COUNT, SKIP, 10), [request(max_new_tokens=4)], budget=budget, **options
        )
        assert [r.cache for r in rounds["a"]] == [None, *[outcome] * 3]


@pytest.mark.parametrize(
    ("favourites", "outcome", "rank"), [((9, 3), HIT, 1), ((9, 8, 3), MISS, 2)]
)
def test_a_rejection_hits_when_the_next_token_was_the_drafts_second_choice(
    favourites, outcome, rank
):
    pair = Pair.of(Counting(12), Scripted(12, errs({3: favourites})), 12)
    rounds = run(pair, [request()], lookahead=3, budget=4, fan_out="uniform")["a"]
    # drafted 1, 2, 9: the outcome is (2, 3); one guess there, the draft's best but 9
    assert summary(rounds) == [
        ((1, 2, 3), 3, 2, None, 0),
        ((4, 5, 6, 7), 3, 3, outcome, 4),
    ]
    assert [r.rank for r in rounds] == [None, rank]  # 9 was rejected and does not count
    # one guess at each position, and its prior chance to be the right one is a half
    assert [r.hit_chance for r in rounds] == [None, pytest.approx(0.5)]


def test_without_a_budget_every_round_is_a_miss_and_nothing_is_guessed():
    rounds = run(Pair.of(COUNT, COUNT, 10), [request()], lookahead=3, budget=0)["a"]
    assert summary(rounds) == [((1, 2, 3, 4), 3, 3, None, 0), ((5, 6, 7), 2, 2, MISS, 0)]


def test_each_sequence_of_a_batch_hits_or_misses_on_its_own():
    # the draft's second choice is right behind 3 tokens, its third behind 7
    draft = Scripted(12, errs({3: (9, 3), 7: (9, 8, 7)}))
    pair = Pair.of(Counting(12), draft, 12, batch_size=2)
    with pair.ssd(lookahead=3, budget=4, fan_out="uniform") as decoder:
        decoder.start([request((0,), 7, "a"), request((0, 1, 2, 3, 4), 6, "b")])
        assert [r.tokens for r in decoder.step()] == [(1, 2, 3), (5, 6, 7)]
        second = decoder.step()
    assert summary(second) == [
        ((4, 5, 6, 7), 3, 3, HIT, 4),
        ((8, 9, 10), 2, 2, MISS, 4),
    ]
    assert [r.backup for r in second] == [None, "neural"]


# --- builds that an early outcome cuts short -----------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "outcome", "guesses"),
    [
        (0, MISS, 0),  # nothing was drafted for any guess
        (1, MISS, 3),  # positions 0..2 were known when the draft was handed over; 3 is known now
        (2, HIT, 4),  # one token is drafted behind the bonus token's guess
        (9, HIT, 4),
    ],
)
def test_a_hit_on_an_unfinished_branch_is_completed_alone(passes, outcome, guesses):
    pair = Pair.of(COUNT, COUNT, 10)
    rounds = run(pair, [request()], passes=passes, lookahead=3, budget=4, fan_out="uniform")["a"]
    assert summary(rounds) == [
        ((1, 2, 3, 4), 3, 3, None, 0),
        ((5, 6, 7), 2, 2, outcome, guesses),
    ]


def test_an_unfinished_cache_is_completed_in_deterministic_mode():
    pair = Pair.of(COUNT, COUNT, 10, deterministic=True)
    rounds = run(pair, [request()], passes=0, lookahead=3, budget=4, fan_out="uniform")["a"]
    assert [r.cache for r in rounds] == [None, HIT]


DEAR_ROWS = PassTimes((1, 11), (0.01, 0.6))  # so that a pass has one row


@contextmanager
def timed_ssd(pair, monkeypatch):
    """SSD that goes by these pass times and a speed that stays as it was believed at first."""
    verify = PassTimes((1, 11), (0.5, 0.6))
    costs = Costs(verify, verify, PassTimes((1,), (0.01,)), DEAR_ROWS)
    monkeypatch.setattr(decoder_module, "measure_costs", lambda *_: costs)
    monkeypatch.setattr(Policy, "observe_round", lambda *_: None)
    automatic = {"lookahead": "auto", "budget": "auto", "build": "likeliest"}
    with pair.ssd(**automatic, fan_out="confidence") as decoder:
        yield decoder


def test_sequences_whose_rows_wait_for_others_are_built_in_the_end(monkeypatch):
    with timed_ssd(Pair.of(COUNT, COUNT, 10, batch_size=3), monkeypatch) as decoder:
        decoder.start([request((start,), 20, f"r{start}") for start in range(3)])
        decoder.step()
        assert [r.cache for r in decoder.step()] == [HIT] * 3


def test_a_verification_whose_beginning_is_not_known_never_ends_a_build(monkeypatch):
    # a sequence that came or went since the last answer: what elapsed is no verification
    with timed_ssd(Pair.of(COUNT, COUNT, 10, batch_size=2), monkeypatch) as decoder:
        decoder.start([request((0,), 20, "a"), request((0,), 20, "b")])
        decoder.step()
        worker = decoder.draft.process.worker
        assert worker._remaining_s() < 1.0
        decoder.release("a")
        assert [r.cache for r in decoder.step()] == [HIT]
        worker.answered_ns = 0
        assert worker._remaining_s() == math.inf


REQUESTS = [
    request([i + 1] * (i % 5 + 1), 3 + 7 * (i % 4), f"r{i}", eos_token_ids=EOS if i % 3 else NEVER)
    for i in range(9)
]


@pytest.mark.parametrize("passes", [0, 1, 3, None])
@pytest.mark.parametrize("fan_out", ["uniform", "geometric", "adaptive"])
@pytest.mark.parametrize(("lookahead", "budget"), [(1, 1), (4, 4), (9, 0), (4, 40)])
def test_every_token_is_the_targets_however_much_was_built(passes, fan_out, lookahead, budget):
    options = {"lookahead": lookahead, "budget": budget, "fan_out": fan_out}
    log = run(HASHED, REQUESTS, passes=passes, **options)
    assert emitted(log) == {r.request_id: greedy_text(Hashed(16, 1), r) for r in REQUESTS}


@pytest.mark.parametrize(("passes", "budget"), [(0, 1), (None, 0)])
def test_a_fast_backup_whose_tokens_are_never_fed_goes_on(passes, budget):
    log = run(HASHED, REQUESTS, passes=passes, lookahead=1, budget=budget, fallback="fast")
    assert emitted(log) == {r.request_id: greedy_text(Hashed(16, 1), r) for r in REQUESTS}


def test_hits_misses_and_early_ends_are_all_frequent_in_these_cases():
    log = run(HASHED, REQUESTS, lookahead=4, budget=4)
    outcomes = [r.cache for rounds in log.values() for r in rounds]
    assert min(outcomes.count(HIT), outcomes.count(MISS)) >= 8
    assert sum(rounds[-1].finish is FinishReason.EOS for rounds in log.values()) >= 3


@pytest.mark.parametrize("fan_out", ["uniform", "geometric", "adaptive", "confidence"])
@pytest.mark.parametrize("passes", [0, 1, 2, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_those_of_sd(temperature, passes, fan_out):
    # A hit hands over what the draft would have proposed just in time, so only the time differs.
    # Sampled, this holds because a speculation's draws are named by where it starts: had a branch
    # shared them with the draft under verification, whose confidences decide what is guessed,
    # whether it is hit would depend on its own draws.
    params = SamplingParams(temperature=temperature, seed=3)
    requests = [replace(r, sampling=params) for r in REQUESTS]
    ssd = run(HASHED, requests, passes=passes, lookahead=4, budget=8, fan_out=fan_out)
    sd = decode(HASHED.sd(4), requests)
    for name, rounds in ssd.items():
        assert [(r.tokens, r.drafted, r.accepted) for r in rounds] == [
            (r.tokens, r.drafted, r.accepted) for r in sd[name]
        ]


# --- draws ---------------------------------------------------------------------------------------


def sampled(requests, batch_size=7, draft_seed=2, **options):
    pair = Pair.of(
        Hashed(16, 1), Hashed(16, draft_seed), 16, batch_size=batch_size, deterministic=True
    )
    return emitted(run(pair, requests, lookahead=3, **{"budget": 8, **options}))


@pytest.mark.parametrize("fan_out", ["uniform", "geometric"])
def test_draws_do_not_depend_on_the_batch_nor_on_the_order(fan_out):
    params = SamplingParams(temperature=1.0, seed=5)
    requests = [request([i + 1] * (i % 3 + 1), 12, f"r{i}", sampling=params) for i in range(7)]
    together = sampled(requests, fan_out=fan_out)
    assert sampled(requests[::-1], batch_size=3, fan_out=fan_out) == together
    for one in requests:
        assert sampled([one], batch_size=1, fan_out=fan_out) == {
            one.request_id: together[one.request_id]
        }


def test_another_seed_draws_another_text():
    texts = {
        seed: sampled([request(max_new_tokens=20, sampling=SamplingParams(1.0, seed=seed))])["a"]
        for seed in range(3)
    }
    assert len(set(texts.values())) == 3


# --- vocabularies of different sizes -------------------------------------------------------------


@pytest.mark.parametrize(
    "draft",
    [
        FixedLogitSpec(Hashed(20, 2), 20),  # padded beyond the target: may propose 16..19
        FixedLogitSpec(Hashed(20, 2), 20, head=tuple(range(16))),  # its padding cut off
        FixedLogitSpec(Hashed(16, 2), 16, head=(0, 1, 3, 4, 7, 8, 11, 15)),  # a trimmed head
        FixedLogitSpec(Hashed(16, 2), 16, head=(5,)),
    ],
    ids=["larger", "limited", "trimmed", "one token"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_other_tokens_changes_nothing_but_the_speed(draft, temperature):
    target = Hashed(16, 1)
    pair = Pair(Models(FixedLogitSpec(target, 16), draft), batch_size=3)
    requests = [
        request(r.prompt_ids, 9, r.request_id, sampling=SamplingParams(temperature))
        for r in REQUESTS
    ]
    with pair.ssd(lookahead=4, budget=8) as decoder:
        texts = emitted(decode(decoder, requests))
    assert all(len(text) == 9 and max(text) < 16 for text in texts.values())
    if temperature == 0:
        assert texts == {r.request_id: greedy_text(target, r) for r in requests}
        assert emitted(decode(pair.sd(4), requests)) == texts


# --- faults inside the worker --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_finite_draft_logits_name_the_sequence_and_the_position(temperature):
    pair = Pair.of(COUNT, NotFinite(COUNT, length=4), 10)
    params = SamplingParams(temperature)
    with pytest.raises(
        NonFiniteLogitsError, match=r"request a, output position 3: draft .*NaN or infinity"
    ):
        run(pair, [request((0,), 9, sampling=params)], lookahead=4)


def test_an_exception_in_the_worker_reaches_the_decoder():
    with pytest.raises(ValueError, match="a text of 6 tokens"):
        run(Pair.of(COUNT, Failing(COUNT, length=6), 10), [request((0,), 9)], lookahead=2)


# --- no growth -----------------------------------------------------------------------------------


def sizes(decoder):
    """Everything on the draft's side that could grow."""
    worker = decoder.draft.process.worker
    (state,) = worker.sequences.values()
    return {
        "kv": worker.cache.bytes,
        "q": decoder.q_buffer.nbytes,
        "tree": state.tree.capacity,
        "cache": state.cache.capacity,
        "sequences": len(worker.sequences),
        "messages": len(decoder.draft.process.unread) + len(decoder.draft.process.answers),
        "unread": len(decoder.draft._answers) + len(decoder.draft._spans),
    }


def test_nothing_grows_over_800_rounds():
    with Pair.of(COUNT, SKIP, 10).ssd(lookahead=2, budget=3) as decoder:
        seen = []
        for text in range(16):
            decoder.start([request((0,), 50, f"r{text}")])
            for _ in range(50):  # one token a round
                decoder.step()
                seen.append(sizes(decoder))
    assert len(seen) == 800
    assert seen[50:] == seen[50:100] * 15  # every text like the second
