"""Rows that cannot be are found, and rows that can are left alone."""

from dataclasses import replace

import pandas as pd
import pytest
from fake_decoding import EOS, decode, emit, stored

from harness.decoder import Span, SpanKind
from harness.invariants import faults, metric_faults, span_faults
from harness.metrics import PositionAcceptance, cell_metrics, split_cells
from harness.plan import Cell

A = "mini/0/r0"
SD = Cell("sd", "mini", 0.0, 1)
MS = 1_000_000


def steps(*told: tuple[float, float, float, float], item: str = "sd/i") -> pd.DataFrame:
    """Steps of (duration, draft, verify, wait) in milliseconds, one after the other.

    Two fifths of a wait are transfers.
    """
    table = pd.DataFrame(told, columns=["wall", "draft_ns", "verify_ns", "wait_ns"]) * MS
    table = table.assign(transfer_ns=0.4 * table["wait_ns"], wait_ns=0.6 * table["wait_ns"])
    ends = table["wall"].cumsum()
    return table.assign(
        item=item, step=range(len(told)), start_ns=ends - table["wall"], end_ns=ends
    )


@pytest.mark.parametrize(
    "told",
    [
        [(200, 40, 100, 59)],  # 1 ms of 200 has no span: bookkeeping
        [(200, 40, 100, 58)],  # 2 ms: 1% of the step
        [(200, 40, 100, 61)],  # 1 ms too much: within 1%
        [(200, 40, 100, 60), (900, 40, 100, 60), (200, 40, 100, 60)],  # one interruption
        [(0.5, 0.1, 0.2, 0)],  # a tiny step that is mostly bookkeeping
        [(200, 0, 0, 0)],  # a decoder without spans
    ],
)
def test_spans_that_add_up(told):
    assert list(span_faults(steps(*told))) == []


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(200, 40, 100, 57)], "sd/i has no span for 3.000 ms of its median step of 200.000 ms"),
        (
            [(200, 40, 100, 60), (200, 140, 100, 60)],
            "sd/i step 1 has spans of 300.000 ms in 200.000 ms",
        ),
    ],
)
def test_spans_that_do_not(told, message):
    assert list(span_faults(steps(*told))) == [message]


def test_a_run_from_before_transfers_were_told_apart_adds_up():
    table = steps((200, 40, 100, 60))
    whole = table["wait_ns"] + table["transfer_ns"]
    old = table.assign(wait_ns=whole, transfer_ns=float("nan"))
    assert list(span_faults(old)) == []


def test_sequences_of_one_step_share_its_spans():
    assert list(span_faults(pd.concat([steps((200, 40, 100, 60))] * 8))) == []


def test_each_item_is_judged_alone():
    sound, unsound = steps((200, 40, 100, 60)), steps((200, 40, 100, 0), item="sd/j")
    (fault,) = span_faults(pd.concat([sound, unsound]))
    assert fault.startswith("sd/j")


def measured(tmp_path):
    script = {A: [emit(A, 1, 2, 3), emit(A, 9, finish=EOS)]}
    run = stored(tmp_path / "run", decode(SD, script))
    (data,) = split_cells(run.requests, run.rounds)
    return run, data


def test_a_sound_cell_has_no_faults(tmp_path):
    run, data = measured(tmp_path)
    assert faults(run.requests, run.rounds, [data]) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peak_tokens_per_s": 9.0, "tokens_per_s": 10.0}, "makes 9.0 tokens/s, the mean is 10.0"),
        ({"acceptance_rate": 1.2}, "the acceptance rate is 1.200"),
        ({"hit_rate": -0.1}, "the hit rate is -0.100"),
        (
            {"acceptance_by_position": (PositionAcceptance(2, 1.5, 4),)},
            "the acceptance at position 2 rate is 1.500",
        ),
    ],
)
def test_figures_that_cannot_be(tmp_path, fields, message):
    _, data = measured(tmp_path)
    sound = cell_metrics(data, devices=1)
    (fault,) = metric_faults("sd/mini", replace(sound, **fields))
    assert fault.endswith(message)


def test_spans_of_the_clock_are_read_from_the_rounds(tmp_path):
    spans = (Span(SpanKind.DRAFT, 1100, 1105), Span(SpanKind.VERIFY, 1103, 1110))  # 2 ns twice
    run = stored(tmp_path / "run", decode(SD, {A: [emit(A, 9, finish=EOS, spans=spans)]}))
    (fault,) = faults(run.requests, run.rounds, ())
    assert fault.startswith("sd/mini/t0/b1/r0/k0 step 0 has spans of")
