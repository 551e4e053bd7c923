"""`on_draft_failure: degrade`: the draft process fails, the target goes on alone, exactly as AR.

The processes are real, the models have known logits (`fixed_logits`).
"""

import os
import signal
from collections import Counter

import pytest
from fixed_logits import FixedLogitSpec, Hashed, Markov, Pair, decode, emitted, greedy_text
from scipy.stats import chi2
from test_ssd_process import request, ssd_process

from harness.decoder import SamplingParams
from harness.errors import DraftProcessError
from impl.engine.draft_process import DraftProcess
from impl.engine.models import Models

TARGET = Hashed(16, 1)
PAIR = Pair.of(TARGET, Hashed(16, 2), 16, batch_size=2)
REQUESTS = [request(f"r{i}", (i,), 12 + 5 * i) for i in range(5)]


def at_the_step(decoder, number, act):
    """Calls `act` before the decoder's step of this number."""
    step, made = decoder.step, Counter()

    def step_after_acting():
        made["steps"] += 1
        if made["steps"] == number:
            act()
        return step()

    decoder.step = step_after_acting


def kill(decoder):
    os.kill(decoder.draft.process.pid, signal.SIGKILL)


def stop(decoder):
    os.kill(decoder.draft.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_draft_killed_in_the_middle_leaves_the_target_to_itself(number):
    with ssd_process(PAIR, on_draft_failure="degrade") as decoder:
        at_the_step(decoder, number, lambda: kill(decoder))
        log = decode(decoder, REQUESTS)
        reason = decoder.diagnostics()["degraded"]
    assert emitted(log) == {r.request_id: greedy_text(TARGET, r) for r in REQUESTS}
    assert reason == f"draft process {decoder.draft.process.pid}: died (killed by SIGKILL)"
    last = log[REQUESTS[-1].request_id]  # admitted when the draft was long gone
    assert [(r.drafted, len(r.tokens), r.cache, r.backup) for r in last] == [(0, 1, None, None)] * (
        len(last)
    )
    if number > 2:
        assert any(r.drafted for r in log["r0"])


def test_a_draft_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(DraftProcess.receive, "__defaults__", (0.3,))
    with ssd_process(PAIR, on_draft_failure="degrade") as decoder:
        at_the_step(decoder, 3, lambda: stop(decoder))
        log = decode(decoder, REQUESTS[:3])
        assert "no answer within 0.3 s" in decoder.diagnostics()["degraded"]
    assert emitted(log) == {r.request_id: greedy_text(TARGET, r) for r in REQUESTS[:3]}


def test_a_degraded_decoder_starts_anew_without_its_draft():
    with ssd_process(PAIR, on_draft_failure="degrade") as decoder:
        kill(decoder)
        log = decode(decoder, REQUESTS[:2])
        again = decode(decoder, REQUESTS[:2])
    assert emitted(log) == emitted(again) == {
        r.request_id: greedy_text(TARGET, r) for r in REQUESTS[:2]
    }  # fmt: skip


def test_without_a_failure_nothing_is_degraded():
    with ssd_process(PAIR, on_draft_failure="degrade") as decoder:
        decode(decoder, REQUESTS[:2])
        assert "degraded" not in decoder.diagnostics()


def test_abort_ends_the_step_with_the_reason():
    with ssd_process(PAIR) as decoder:
        at_the_step(decoder, 2, lambda: kill(decoder))
        with pytest.raises(DraftProcessError, match="killed by SIGKILL"):
            decode(decoder, REQUESTS)
        assert "degraded" not in decoder.diagnostics()


def test_at_temperature_1_what_follows_the_failure_is_the_targets():
    """First tokens behind the failure; false-alarm rate 1e-4 over the fixed seeds."""
    p, q = (0.45, 0.33, 0.22), (0.15, 0.25, 0.6)
    models = Models(*(FixedLogitSpec(Markov((row,) * 3), 3) for row in (p, q)))
    params = SamplingParams(temperature=1.0)
    requests = [request(f"r{i}", (i % 3,), 48, sampling=params) for i in range(40)]
    with ssd_process(Pair(models, batch_size=8), on_draft_failure="degrade") as decoder:
        at_the_step(decoder, 4, lambda: kill(decoder))
        log = decode(decoder, requests)
        assert "degraded" in decoder.diagnostics()
    alone = [r.tokens[0] for rounds in log.values() for r in rounds if not r.drafted]
    counts = Counter(alone)
    expected = [len(alone) * each for each in p]
    statistic = sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected))
    assert len(alone) > 1000
    assert chi2.sf(statistic, len(p) - 1) > 1e-4
