"""Delays planted in a real draft process are told as what they are: drafting, waits, transfers."""

import time
from statistics import median

import pytest
from fixed_logits import PLAIN, Counting, Pair

from harness.decoder import Request, SpanKind
from harness.registry import decoder_class
from impl.engine import chain_decoder
from impl.engine.chain_drafter import ChainDrafter
from impl.ssd import decoder as ssd_decoder
from impl.ssd.speculator import Speculator

pytestmark = pytest.mark.alone

DELAY_S = 0.15  # passes of these models take a hundredth of it, on a busy machine a tenth
CRITICAL = (SpanKind.DRAFT, SpanKind.VERIFY, SpanKind.WAIT, SpanKind.TRANSFER)
OPTIONS = {"ssd": PLAIN, "amusd": {}, "pearl": {"lookahead": 2}}


class SlowMail:
    """A channel whose messages leave late."""

    def __init__(self, channel):
        self.offer, self.poll, self.receive = channel.offer, channel.poll, channel.receive
        self._send = channel.send

    def send(self, message):
        time.sleep(DELAY_S)
        self._send(message)


class LateAnswer(Speculator):
    def serve(self, channel):
        super().serve(SlowMail(channel))


class SlowHandOver(Speculator):
    def _hand_over(self, state):
        time.sleep(DELAY_S)
        return super()._hand_over(state)


class SlowDrafting(Speculator):
    def _complete_trunks(self, states):
        time.sleep(DELAY_S)
        super()._complete_trunks(states)


class BusyBehindItsAnswer(Speculator):
    def _begin_caches(self, asked):
        time.sleep(DELAY_S)
        super()._begin_caches(asked)


class SlowChainHandOver(ChainDrafter):
    def _take(self, growth):
        time.sleep(DELAY_S)
        return super()._take(growth)


class LateToStart(ChainDrafter):
    def _start(self, message):
        time.sleep(DELAY_S)
        super()._start(message)


def step_times(method):
    """Milliseconds of each step by kind of span, and of the step; the draft errs every time."""
    kind, pair = decoder_class(method), Pair.of(Counting(10), Counting(10, step=2), 10)
    decoder = kind.create(pair.setup(kind.Options(**OPTIONS[method])))
    found = []
    try:
        decoder.start([Request("a", (0,), 30)])
        for _ in range(8):
            start_ns = time.perf_counter_ns()
            (done,) = decoder.step()
            step_ms = (time.perf_counter_ns() - start_ns) / 1e6
            spent = dict.fromkeys(CRITICAL, 0.0)
            for span in done.spans:
                if span.kind in spent:
                    assert span.start_ns >= start_ns
                    spent[span.kind] += (span.end_ns - span.start_ns) / 1e6
            found.append((spent, step_ms))
    finally:
        decoder.close()
    return found[1:]  # in the first step nothing came before


@pytest.mark.parametrize(
    ("method", "worker", "kind"),
    [
        ("ssd", LateAnswer, SpanKind.TRANSFER),
        ("ssd", SlowHandOver, SpanKind.TRANSFER),
        ("ssd", SlowDrafting, SpanKind.DRAFT),
        ("ssd", BusyBehindItsAnswer, SpanKind.WAIT),
        ("amusd", SlowChainHandOver, SpanKind.TRANSFER),
        ("pearl", LateToStart, SpanKind.WAIT),
    ],
)
def test_a_planted_delay_is_told_as_what_it_is(monkeypatch, method, worker, kind):
    monkeypatch.setattr(ssd_decoder, "Speculator", worker)
    monkeypatch.setattr(chain_decoder, "ChainDrafter", worker)
    steps = step_times(method)
    assert median(spent[kind] for spent, _ in steps) > 0.7 * 1e3 * DELAY_S
    assert median(spent[kind] / step_ms for spent, step_ms in steps) > 0.5
    told = [sum(spent.values()) / step_ms for spent, step_ms in steps]
    assert max(told) <= 1
    assert median(told) > 0.95
