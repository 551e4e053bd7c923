"""AMUSD and PEARL with their real draft process: the right tokens, and what happens when it fails.

The models have known logits (`fixed_logits`); one step takes milliseconds.
"""

import os
import signal
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from fixed_logits import (
    FixedLogitSpec,
    Hashed,
    Markov,
    NotFinite,
    Pair,
    decode,
    emitted,
    greedy_text,
)
from scipy.stats import chi2

from harness.decoder import Request, SamplingParams
from harness.errors import DraftProcessError
from harness.registry import decoder_class
from impl.engine.models import Models

METHODS = ("amusd", "pearl")
TARGET = Hashed(16, 1)
PAIR = Pair.of(TARGET, Hashed(16, 2), 16, batch_size=3)
REQUESTS = [
    Request(f"r{i}", (i + 1,) * (i % 5 + 1), 3 + 7 * (i % 4), eos_token_ids=frozenset({3}))
    for i in range(9)
]
TEXTS = {r.request_id: greedy_text(TARGET, r) for r in REQUESTS}


@contextmanager
def opened(method, pair=PAIR, **options):
    """A method with a process of its own; nothing of it may be left behind."""
    kind = decoder_class(method)
    decoder = kind.create(pair.setup(kind.Options(**options)))
    try:
        yield decoder
    finally:
        decoder.close()
        decoder.close()  # twice is fine
        assert not psutil.pid_exists(decoder.draft.process.pid)


@pytest.mark.parametrize("channel", ["shared", "distributed"])
@pytest.mark.parametrize("method", METHODS)
def test_a_deterministic_decoder_makes_the_rounds_of_its_worker_in_this_process(method, channel):
    params = SamplingParams(temperature=1.0, seed=3)
    sampled = [Request(f"r{i}", (i,), 20, params) for i in range(5)]
    pair = replace(PAIR, deterministic=True)
    with opened(method, replace(pair, channel=channel)) as decoder:
        texts = emitted(decode(decoder, REQUESTS))
        log = decode(decoder, sampled)  # names and slots come back
    assert texts == TEXTS
    with getattr(pair, method)() as local:
        expected = decode(local, sampled)
    assert rounds_of(log) == rounds_of(expected)
    rounds = [r for each in log.values() for r in each]
    assert any(r.accepted < r.drafted for r in rounds)
    assert any(r.accepted == r.drafted > 1 for r in rounds)


def rounds_of(log):
    return {
        name: [(r.tokens, r.drafted, r.accepted) for r in rounds] for name, rounds in log.items()
    }


@pytest.mark.parametrize("method", METHODS)
def test_what_the_process_drafts_is_drawn_from_the_target(method):
    """First tokens of rounds; false-alarm rate 1e-4 over the fixed seeds and every timing."""
    p, q = (0.45, 0.33, 0.22), (0.15, 0.25, 0.6)
    pair = Pair(Models(*(FixedLogitSpec(Markov((r,) * 3), 3) for r in (p, q))), batch_size=8)
    params = SamplingParams(temperature=1.0)
    with opened(method, pair) as decoder:
        log = decode(decoder, [Request(f"r{i}", (i % 3,), 48, params) for i in range(40)])
    first = Counter(r.tokens[0] for rounds in log.values() for r in rounds)
    total = sum(first.values())
    statistic = sum((first[t] - total * each) ** 2 / (total * each) for t, each in enumerate(p))
    assert total > 500
    assert chi2.sf(statistic, 2) > 1e-4


# --- failure --------------------------------------------------------------------------------------


def make_steps(decoder, count):
    for _ in range(count):
        decoder.step()


def kill(decoder):
    os.kill(decoder.draft.process.pid, signal.SIGKILL)


def test_a_draft_that_was_killed_ends_the_cell():
    with opened("pearl") as decoder:
        decoder.start([Request("a", (0,), 60)])
        decoder.step()
        kill(decoder)
        with pytest.raises(DraftProcessError, match="killed by SIGKILL"):
            make_steps(decoder, 60)


@pytest.mark.parametrize(("method", "steps"), [("amusd", 3), ("pearl", 1)])
def test_a_draft_that_was_killed_leaves_the_target_to_itself(method, steps):
    requests = [Request(f"r{i}", (i,), 12 + 5 * i) for i in range(3)]
    with opened(method, on_draft_failure="degrade") as decoder:
        decoder.start(requests)
        texts = {r.request_id: () for r in requests}
        for number in range(99):
            if number == steps:
                kill(decoder)
            for round_ in decoder.step():
                texts[round_.request_id] += round_.tokens
        assert texts == {r.request_id: greedy_text(TARGET, r) for r in requests}
        assert "killed by SIGKILL" in decoder.diagnostics()["degraded"]
        again = emitted(decode(decoder, REQUESTS))  # the same names as before, without a draft
    assert again == TEXTS


def test_not_finite_draft_logits_name_the_request_and_the_position(capfd):
    pair = Pair.of(TARGET, NotFinite(Hashed(16, 1), length=4), 16)
    with opened("pearl", pair) as decoder:
        decoder.start([Request("bad", (0,), 30)])
        with pytest.raises(DraftProcessError, match=r"bad, output position 3: draft .*NaN"):
            make_steps(decoder, 30)
