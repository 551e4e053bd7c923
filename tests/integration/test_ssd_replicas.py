"""SSD with two draft processes, each with a replica of the draft; `test_replicas` has the rounds.

The first shares the target's core, so that a machine with two cores has room.
"""

import json
import os
import signal
from collections import Counter
from dataclasses import replace

import psutil
import pytest
from click.testing import CliRunner
from fixed_logits import Hashed, Pair, decode, emitted, greedy_text
from test_ssd_process import TINY, request, ssd_process

from harness.cli import cli
from harness.decoder import CacheOutcome, SamplingParams
from harness.errors import DraftProcessError
from harness.store import read_manifest
from impl.engine.models import Models, ModelSpec
from impl.ssd import decoder as ssd
from impl.ssd.options import SaguaroOptions

if len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs two cores", allow_module_level=True)

TARGET = Hashed(16, 1)
PAIR = Pair.of(TARGET, Hashed(16, 2), 16, batch_size=2, drafts=2)
MODELS = Models(*(ModelSpec(TINY / role, "float32") for role in ("target", "draft")))
REQUESTS = [request(f"r{i}", (i,), 12 + 5 * i) for i in range(5)]


def watched(decoder):
    owners, draft_of = Counter(), decoder._draft_of

    def draft_of_watched(sequence, speculation):
        owners[speculation.replica, speculation.cache] += 1
        return draft_of(sequence, speculation)

    decoder._draft_of = draft_of_watched
    return owners


def decode_on(decoder):
    for _ in range(3):  # the answer to the last outcomes may have been sent before a death
        decoder.step()


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_greedy_outputs_of_the_tiny_pair_are_ars_and_either_replica_hits(batch_size):
    pair = Pair(MODELS, batch_size=batch_size, max_context=128, drafts=2)
    texts = [request(f"r{i}", (i + 5, 6, 7), 10 + 8 * (i % 4)) for i in range(9)]
    expected = emitted(decode(pair.ar(), texts))
    with ssd_process(pair, lookahead=4, budget=8) as decoder:
        owners = watched(decoder)
        log = decode(decoder, texts)
        pids = [process.pid for process in decoder.processes]
        cores = [psutil.Process(pid).cpu_affinity() for pid in pids]
        assert decoder.diagnostics()["drafts"] == 2
    assert emitted(log) == expected
    assert cores == [[0], [1]]
    assert min(owners[number, CacheOutcome.HIT] for number in (0, 1)) >= 3
    assert max(r.guesses for rounds in log.values() for r in rounds) > 8  # one replica's budget


def test_the_defaults_calibrate_and_decode_the_tiny_pair_as_ar_does():
    pair = Pair(MODELS, batch_size=2, max_context=128, drafts=2)
    texts = [request(f"r{i}", (i + 5, 6, 7), 24) for i in range(4)]
    expected = emitted(decode(pair.ar(), texts))
    decoder = ssd.SaguaroDecoder.create(pair.setup(SaguaroOptions()))
    try:
        assert emitted(decode(decoder, texts)) == expected
    finally:
        decoder.close()


@pytest.mark.parametrize("channel", ["shared", "distributed"])
def test_where_nothing_follows_the_clock_replicas_emit_the_tokens_of_one_draft(channel):
    """Sampled ones too: a draw depends on the place of its token, not on who draws it."""
    drawn = SamplingParams(temperature=1.0, seed=5)
    texts = [request(f"s{i}", (i + 5, 6, 7), 24, sampling=drawn) for i in range(4)]
    pair = Pair(
        MODELS, batch_size=2, max_context=128, deterministic=True, drafts=2, channel=channel
    )
    options = {"lookahead": 4, "saguaro_c": 0.5}
    with ssd_process(pair, budget=4, **options) as decoder:
        several = decode(decoder, texts)
    with replace(pair, drafts=1).ssd(budget=8, **options) as decoder:
        one = decode(decoder, texts)
    assert {name: [(r.tokens, r.cache) for r in rounds] for name, rounds in several.items()} == {
        name: [(r.tokens, r.cache) for r in rounds] for name, rounds in one.items()
    }
    outcomes = Counter(r.cache for rounds in several.values() for r in rounds)
    assert min(outcomes[CacheOutcome.HIT], outcomes[CacheOutcome.MISS]) >= 3


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_replica_ends_the_step_or_leaves_the_target_to_itself(number, signal_number):
    with ssd_process(PAIR) as decoder:
        decoder.start(REQUESTS[:2])
        decoder.step()
        os.kill(decoder.processes[number].pid, signal_number)
        reason = f"draft process {decoder.processes[number].pid}: died"
        with pytest.raises(DraftProcessError, match=reason):
            decode_on(decoder)
    with ssd_process(PAIR, on_draft_failure="degrade") as decoder:
        step, made = decoder.step, []

        def step_and_kill():
            made.append(1)
            if len(made) == 3:
                os.kill(decoder.processes[number].pid, signal_number)
            return step()

        decoder.step = step_and_kill
        log = decode(decoder, REQUESTS)
        assert "died" in decoder.diagnostics()["degraded"]
        assert not any(psutil.pid_exists(process.pid) for process in decoder.processes)
    assert emitted(log) == {r.request_id: greedy_text(TARGET, r) for r in REQUESTS}


def test_a_run_with_two_drafts_is_certified_and_divides_by_its_devices(tmp_path, monkeypatch):
    own, out = os.sched_getaffinity(0), tmp_path / "run"
    arguments = (
        *("run", "--pair", "tiny", "--datasets", "mini", "--prompts", "12", "--dtype", "float32"),
        *("--methods", "ar,pearl,ssd", "--temperatures", "0,1", "--max-new-tokens", "64"),
        *("--warmup-steps", "2", "--no-control", "--draft-device", "cpu,cpu"),
        *("--draft-cores", "0,1", "--out", str(out)),
    )
    ran = CliRunner().invoke(cli, arguments)
    os.sched_setaffinity(0, own)
    assert ran.exit_code == 0, ran.output
    verified = CliRunner().invoke(cli, ("verify", str(out), "--json"))
    os.sched_setaffinity(0, own)
    assert verified.exit_code == 0, verified.output
    verdicts = json.loads(verified.stdout)["verdicts"]
    assert {v["status"] for v in verdicts if v["method"] == "ssd"} == {"pass"}
    manifest = read_manifest(out)
    assert manifest["fingerprint"]["placement"]["draft_device"] == "cpu,cpu"
    assert manifest["fingerprint"]["placement"]["shared"] is True
    devices = {cell.split("/")[0]: d["devices"] for cell, d in manifest["decoders"].items()}
    # core 0 is the target's and its first draft's; PEARL has that draft alone
    assert devices == {"ar": 1, "pearl": 1, "ssd": 2}
    drafts = [d["diagnostics"]["drafts"] for c, d in manifest["decoders"].items() if "ssd" in c]
    assert drafts == [2, 2]
