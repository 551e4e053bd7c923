"""SSD with its real draft process: same rounds as in one process, and what happens when it fails.

The models have known logits (`fixed_logits`); one step takes milliseconds.
"""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fixed_logits import (
    PLAIN,
    Counting,
    Failing,
    FixedLogitSpec,
    Hashed,
    NotFinite,
    Pair,
    decode,
    emitted,
    greedy_text,
)

from harness.decoder import CacheOutcome, Placement, Request, SamplingParams
from harness.errors import DraftProcessError, NonFiniteLogitsError
from impl.engine import placement
from impl.engine.draft_process import DraftProcess
from impl.engine.models import Models, ModelSpec
from impl.ssd import decoder as ssd
from impl.ssd.options import SaguaroOptions

SOON_S = 5.0
TINY = Path(__file__).parents[2] / "harness" / "tiny"
COUNT = Counting(10)


def request(name="a", prompt=(0,), max_new_tokens=30, **settings):
    return Request(name, tuple(prompt), max_new_tokens, **settings)


@contextmanager
def ssd_process(pair, **options):
    """SSD with processes of its own, one for each draft; nothing of them may be left behind."""
    decoder = ssd.SaguaroDecoder.create(pair.setup(SaguaroOptions(**PLAIN | options)))
    try:
        yield decoder
    finally:
        decoder.close()
        decoder.close()  # twice is fine
        pids = [process.pid for process in decoder.processes]
        assert not any(map(psutil.pid_exists, pids))
        for pid in (os.getpid(), *pids):
            assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


@pytest.fixture
def started():
    """A decoder that has made one step; its texts are far from their end."""
    with ssd_process(Pair.of(COUNT, COUNT, 10, batch_size=2), lookahead=3) as decoder:
        decoder.start([request("a"), request("b", (5,))])
        decoder.step()
        yield decoder


@contextmanager
def told_soon(reason, error=DraftProcessError):
    start = time.monotonic()
    with pytest.raises(error, match=reason):
        yield
    assert time.monotonic() - start < SOON_S


# --- the same rounds as with the worker in this process ------------------------------------------


def test_sequences_that_come_and_go_are_decoded_exactly_in_either_mode():
    target = Hashed(16, 1)
    requests = [request(f"r{i}", [i + 1] * (i % 5 + 1), 3 + 7 * (i % 4)) for i in range(9)]
    pair = Pair.of(target, Hashed(16, 2), 16, batch_size=3, deterministic=True)
    with ssd_process(pair, lookahead=4, budget=4) as decoder:
        first = decode(decoder, requests)
        again = decode(decoder, requests)  # names and slots come back
    assert emitted(first) == {r.request_id: greedy_text(target, r) for r in requests}
    with pair.ssd(lookahead=4, budget=4) as decoder:
        local = decode(decoder, requests)
    for name, rounds in local.items():
        expected = [(r.tokens, r.drafted, r.accepted, r.cache, r.guesses) for r in rounds]
        for log in (first, again):
            assert [
                (r.tokens, r.drafted, r.accepted, r.cache, r.guesses) for r in log[name]
            ] == expected
    outcomes = [r.cache for rounds in local.values() for r in rounds]
    assert min(outcomes.count(CacheOutcome.HIT), outcomes.count(CacheOutcome.MISS)) >= 8


@pytest.mark.parametrize("channel", ["shared", "distributed"])
def test_draws_are_those_of_the_worker_in_this_process(channel):
    params = SamplingParams(temperature=1.0, seed=3)
    requests = [request(f"r{i}", (i,), 20, sampling=params) for i in range(5)]
    pair = Pair.of(Hashed(16, 1), Hashed(16, 2), 16, batch_size=2, deterministic=True)
    with ssd_process(replace(pair, channel=channel), lookahead=3, budget=4) as decoder:
        texts = emitted(decode(decoder, requests))
    with pair.ssd(lookahead=3, budget=4) as decoder:
        assert emitted(decode(decoder, requests)) == texts


def test_the_tiny_pair_emits_the_same_ids_over_either_channel():
    """At temperature 0 and 1 together; with a trimmed draft vocabulary and Saguaro's q."""
    draft = ModelSpec(TINY / "draft", "float32", vocab_limit=500)
    models = Models(ModelSpec(TINY / "target", "float32"), draft)
    pair = Pair(models, batch_size=2, max_context=128, deterministic=True)
    drawn = SamplingParams(temperature=1.0, seed=5)
    greedy = [request(f"g{i}", (i + 5, 6, 7), 24) for i in range(2)]
    sampled = [request(f"s{i}", (i + 5, 6, 7), 24, sampling=drawn) for i in range(3)]
    options = {"lookahead": 4, "budget": 8, "saguaro_c": 0.5}
    logs = {}
    for channel in ("shared", "distributed"):
        with ssd_process(replace(pair, channel=channel), **options) as decoder:
            logs[channel] = decode(decoder, [*greedy, *sampled])
    assert emitted(logs["distributed"]) == emitted(logs["shared"])
    rounds = [r for name in ("s0", "s1", "s2") for r in logs["distributed"][name]]
    assert any(r.accepted < r.drafted for r in rounds)  # rows were asked for
    assert any(r.accepted > 0 for r in rounds)


def test_a_killed_draft_is_told_over_the_distributed_channel():
    params = SamplingParams(temperature=1.0)
    pair = Pair.of(Hashed(16, 1), Hashed(16, 2), 16, channel="distributed")
    with ssd_process(pair, lookahead=3) as decoder:
        decoder.start([request(sampling=params)])
        decoder.step()
        os.kill(decoder.draft.process.pid, signal.SIGKILL)
        with told_soon(r"draft process \d+: died \(killed by SIGKILL\)"):
            decoder.step()
            decoder.step()  # its answer to the last outcomes may have been sent before


# --- death ---------------------------------------------------------------------------------------


def test_a_draft_process_killed_between_two_steps_ends_the_next_one(started):
    os.kill(started.draft.process.pid, signal.SIGKILL)
    with told_soon(r"draft process \d+: died \(killed by SIGKILL\)"):
        started.step()
        started.step()  # its answer to the last outcomes may have been sent before


def test_a_draft_process_killed_while_idle_is_told_by_the_next_call(started):
    os.kill(started.draft.process.pid, signal.SIGKILL)
    # Waits for its last thread, which lets go of the pipe, and leaves the exit code to the decoder.
    os.waitid(os.P_PID, started.draft.process.pid, os.WEXITED | os.WNOWAIT)
    with told_soon("killed by SIGKILL"):
        started.release("a")


def test_a_draft_process_killed_during_a_step_ends_it(started, monkeypatch):
    verify = started.verifier.verify

    def kill_and_verify(*arguments):
        os.kill(started.draft.process.pid, signal.SIGKILL)
        return verify(*arguments)

    monkeypatch.setattr(started.verifier, "verify", kill_and_verify)
    with told_soon("killed by SIGKILL"):
        started.step()
        started.step()


def test_a_draft_process_killed_during_a_prefill_ends_the_start():
    with ssd_process(Pair.of(COUNT, COUNT, 10)) as decoder:
        os.kill(decoder.draft.process.pid, signal.SIGKILL)
        with told_soon("killed by SIGKILL"):
            decoder.start([request()])


def test_a_hanging_draft_process_is_told_after_the_reply_timeout(started, monkeypatch):
    monkeypatch.setattr(DraftProcess.receive, "__defaults__", (0.3,))
    os.kill(started.draft.process.pid, signal.SIGSTOP)
    with told_soon(r"draft process \d+: no answer within 0\.3 s"):
        started.step()
        started.step()


# --- failure inside the worker, and NaN ----------------------------------------------------------


def test_an_exception_in_the_worker_ends_the_step_with_its_reason(capfd):
    with ssd_process(Pair.of(COUNT, Failing(COUNT, length=9), 10), lookahead=2) as decoder:
        decoder.start([request()])
        with told_soon("ValueError: a text of 9 tokens"):
            for _ in range(9):
                decoder.step()


def test_a_worker_that_cannot_load_its_model_says_why(tmp_path, capfd):
    bad = Models(FixedLogitSpec(COUNT, 10), ModelSpec(tmp_path / "nothing", head_size=None))
    children = psutil.Process().children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSpec, "head_ids", lambda _: None)
        patch.setattr(ModelSpec, "width", lambda _: 10)
        with pytest.raises(DraftProcessError, match=r"draft process \d+: .*nothing"):
            ssd.SaguaroDecoder.create(Pair(bad).setup(SaguaroOptions(**PLAIN)))
    left = {p.pid for p in psutil.Process().children()} - {p.pid for p in children}
    assert all("resource_tracker" in " ".join(psutil.Process(pid).cmdline()) for pid in left)


def test_not_finite_draft_logits_name_the_request_and_the_position(capfd):
    with ssd_process(Pair.of(COUNT, NotFinite(COUNT, length=4), 10), lookahead=2) as decoder:
        decoder.start([request("bad")])
        with told_soon(r"request bad, output position 3: draft .*NaN or infinity"):
            for _ in range(9):
                decoder.step()


def test_not_finite_target_logits_name_the_request_and_the_position():
    with ssd_process(Pair.of(NotFinite(COUNT, length=4), COUNT, 10), lookahead=1) as decoder:
        decoder.start([request("bad")])
        decoder.step()  # emits output tokens 0 and 1
        with told_soon(r"request bad, output position 2: target .*NaN", NonFiniteLogitsError):
            decoder.step()


# --- placement -----------------------------------------------------------------------------------


def test_the_worker_runs_on_its_own_cores(started):
    cores = list(Placement().draft_cores)
    if max(cores) >= (os.cpu_count() or 1):
        pytest.skip("this machine has one core")
    assert psutil.Process(started.draft.process.pid).cpu_affinity() == cores


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_neither_process_grows_over_10000_rounds_of_the_tiny_pair():
    specs = [ModelSpec(TINY / role, "float32") for role in ("target", "draft")]
    pair = Pair(Models(*specs), batch_size=1, max_context=512)
    tokens, texts, sizes = 300, 0, []
    options = {"lookahead": "auto", "budget": "auto", "build": "likeliest"}
    own_core = placement.applied(Placement().target_cores)  # as the harness does: one thread
    with own_core, ssd_process(pair, **options) as decoder:
        processes = [psutil.Process(), psutil.Process(decoder.draft.process.pid)]
        rounds = 0
        while rounds < 10_000:
            texts += 1
            log = decode(decoder, [request(f"r{texts}", (texts % 60 + 1, 5, 9), tokens)])
            rounds += sum(map(len, log.values()))
            sizes.append([process.memory_info().rss for process in processes])
    quarter = len(sizes) // 4
    for early, late in zip(sizes[quarter], sizes[-1], strict=True):
        assert late - early < 16e6  # allocators breathe; one q row kept a round would be 40 MB
