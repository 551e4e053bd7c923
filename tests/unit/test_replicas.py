"""SSD with several drafts that share out one speculation cache, stepped in this process.

See `test_ssd_speculation` for the models; guess i is prepared by replica i modulo N.
"""

from collections import Counter
from dataclasses import replace

import pytest
from fixed_logits import Hashed, Pair, decode, emitted, greedy_text
from test_ssd_speculation import COUNT, SKIP, request, summary

from harness.decoder import CacheOutcome, SamplingParams
from impl.ssd import replicas
from impl.ssd.policy import Policy
from impl.ssd.replicas import Replica

HIT, MISS = CacheOutcome.HIT, CacheOutcome.MISS
HASHED = Pair.of(Hashed(16, 1), Hashed(16, 2), 16, batch_size=3, deterministic=True)
MIXED = [
    request([i + 1] * (i % 5 + 1), 3 + 7 * (i % 4), f"r{i}", sampling=SamplingParams(i % 2))
    for i in range(9)
]


def watched(decoder):
    """The replicas that what is verified comes from, as the decoder goes on."""
    owners, draft_of = [], decoder._draft_of

    def draft_of_watched(sequence, speculation):
        owners.append(speculation.replica)
        return draft_of(sequence, speculation)

    decoder._draft_of = draft_of_watched
    return owners


def run(pair, requests, **options):
    with pair.ssd(**options) as decoder:
        owners = watched(decoder)
        return decode(decoder, requests), Counter(owners)


@pytest.mark.parametrize(
    ("drafts", "budget", "outcome", "owner"),
    [
        (1, 5, MISS, 0),
        (2, 4, MISS, 0),  # eight guesses; the first replica drafts after a miss
        (2, 5, HIT, 0),  # guess 8 of 0 to 9 is the first's
        (3, 3, HIT, 2),  # the last of nine
        (3, 2, MISS, 0),
    ],
)
def test_together_replicas_guess_what_none_of_them_has_room_for(drafts, budget, outcome, owner):
    # t* = c+1 is SKIP's 9th guess, see test_a_large_enough_budget_hits_even_the_last_guess
    pair = replace(Pair.of(COUNT, SKIP, 10), drafts=drafts)
    options = {"lookahead": 1, "fan_out": "geometric", "acceptance": 0.0, "budget": budget}
    with pair.ssd(**options) as decoder:
        owners = watched(decoder)
        rounds = decode(decoder, [request(max_new_tokens=4)])["a"]
    assert [r.cache for r in rounds] == [None, *[outcome] * 3]
    assert owners == [0, *[owner] * 3]
    assert [r.guesses for r in rounds] == [0, *[min(drafts * budget, 9)] * 3]  # of ten tokens


@pytest.mark.parametrize("drafts", [2, 4])
def test_replicas_make_the_rounds_of_one_draft_with_their_budgets_sum(drafts):
    one, _ = run(HASHED, MIXED, lookahead=4, budget=8)
    several, owners = run(replace(HASHED, drafts=drafts), MIXED, lookahead=4, budget=8 // drafts)
    assert {name: summary(rounds) for name, rounds in several.items()} == {
        name: summary(rounds) for name, rounds in one.items()
    }
    chances = [[r.hit_chance for r in rounds] for rounds in several.values()]
    for found, rounds in zip(chances, one.values(), strict=True):
        assert found == pytest.approx([r.hit_chance for r in rounds])
    assert owners.keys() == set(range(drafts))
    outcomes = [r.cache for rounds in several.values() for r in rounds]
    assert min(outcomes.count(HIT), outcomes.count(MISS)) >= 8
    assert max(r.guesses for rounds in several.values() for r in rounds) == 8


@pytest.mark.parametrize("fallback", ["fast", "adaptive"])
@pytest.mark.parametrize("budget", [0, 3])
def test_whoever_drafts_greedy_outputs_are_the_targets(fallback, budget):
    requests = [replace(r, sampling=SamplingParams()) for r in MIXED]
    for deterministic, passes in ((True, None), (False, 1), (False, 3)):
        pair = replace(HASHED, drafts=2, deterministic=deterministic)
        log, _ = run(pair, requests, budget=budget, fallback=fallback, passes=passes)
        expected = {r.request_id: greedy_text(Hashed(16, 1), r) for r in requests}
        assert emitted(log) == expected


def test_a_hit_that_is_too_short_is_completed_by_the_replica_that_has_it():
    """Two passes beside the target draft two of four tokens; the owner drafts the rest."""
    pair = replace(Pair.of(COUNT, COUNT, 10), drafts=2)
    rounds, owners = run(pair, [request(max_new_tokens=30)], budget=10, passes=2)
    assert [r.drafted for r in rounds["a"]] == [4] * 6
    assert [r.cache for r in rounds["a"]] == [None, *[HIT] * 5]
    assert sum(owners.values()) == 6


def test_of_two_replicas_with_the_same_hit_the_first_is_taken(monkeypatch):
    """As where replicas have learned different things; the second adopts what the first has."""
    one, _ = run(HASHED, MIXED, budget=4)
    same = Counter()

    def first_ones(self, before):
        same[self.number] += 1
        return slice(0, max(0, 4 - before))

    monkeypatch.setattr(Replica, "_share", first_ones)
    both, owners = run(replace(HASHED, drafts=2), MIXED, budget=4)
    for name, rounds in both.items():  # a branch and the backup draw the same tokens
        assert [(r.tokens, r.drafted) for r in rounds] == [(r.tokens, r.drafted) for r in one[name]]
    assert owners.keys() == {0}
    assert min(same[0], same[1]) > 20


def test_every_replica_learns_what_the_others_had_guessed(monkeypatch):
    missed = Counter()
    observe = Policy.observe

    def counted(self, verdict):
        missed[self, verdict.missed] += 1
        observe(self, verdict)

    monkeypatch.setattr(Policy, "observe", counted)
    log, _ = run(replace(HASHED, drafts=2), MIXED, lookahead=4, budget=4)
    outcomes = Counter(r.cache for rounds in log.values() for r in rounds)
    for policy in {policy for policy, _ in missed}:
        # a hit or a miss each; the last outcome of a sequence is told to nobody
        assert (missed[policy, False], missed[policy, True]) == (outcomes[HIT], outcomes[MISS])


def test_a_sequence_given_up_in_the_middle_leaves_the_others_alone():
    target = Hashed(16, 1)
    with replace(HASHED, drafts=2).ssd(lookahead=4, budget=4) as decoder:
        texts = [request([i + 1], 20, f"r{i}") for i in range(4)]
        decoder.start(texts[:3])
        found = {r.request_id: () for r in texts}
        for number in range(40):
            if number == 2:
                decoder.release("r1")  # whose outcome is on its way
                decoder.admit(texts[3])
            for round_ in decoder.step():
                found[round_.request_id] += round_.tokens
                if round_.finish:
                    decoder.release(round_.request_id)
            if not decoder.slots.all():
                break
    for text in (texts[0], texts[2], texts[3]):
        assert found[text.request_id] == greedy_text(target, text)


def test_nothing_grows_over_400_rounds():
    def sizes(decoder):
        workers = [replica.process.worker for replica in decoder.draft.replicas]
        states = [state for worker in workers for state in worker.sequences.values()]
        return {
            "kv": [worker.cache.bytes for worker in workers],
            "tree": [state.tree.capacity for state in states],
            "cache": [state.cache.capacity for state in states],
            "asked": [len(worker.asked) <= 1 for worker in workers],
            "unready": [len(worker.unready) <= 1 for worker in workers],
            "unread": [len(replica._answers) for replica in decoder.draft.replicas],
            "spans": [len(replica._spans) for replica in decoder.draft.replicas],
            "q": decoder.q_buffer.nbytes,
        }

    with replace(Pair.of(COUNT, SKIP, 10), drafts=2).ssd(lookahead=2, budget=3) as decoder:
        seen = []
        for text in range(8):
            decoder.start([request((0,), 50, f"r{text}")])
            for _ in range(50):
                decoder.step()
                seen.append(sizes(decoder))
    assert all(size == seen[0] for size in seen)
    capacity = 2 + 2 + 3 * 3  # as for one draft of this budget: t*, an accepted one, K; branches
    assert seen[0]["tree"] == [capacity] * 2
    assert seen[0]["q"] == 2 * 2 * 10 * 4  # replicas, K, vocabulary, float32


def test_a_miss_of_all_goes_to_the_first_and_a_hit_to_the_first_that_has_it():
    def offers(*found):
        speculation = replicas.Speculation("a", (), None, None, 0, None, None)
        return [speculation._replace(cache=cache) for cache in found]

    assert replicas._owner(offers(None, None)) == 0
    assert replicas._owner(offers(MISS, MISS, MISS)) == 0
    assert replicas._owner(offers(MISS, HIT, HIT)) == 1
    assert replicas._owner(offers(HIT, HIT, MISS)) == 0
