import pandas as pd
import pytest
from fake_decoding import EOS, A, B, C, batch_of_two, cells, decode, emit, one_token_rounds

from harness.decoder import CacheOutcome, Round, Span, SpanKind
from harness.metrics import (
    Percentiles,
    PositionAcceptance,
    acceptance_by_position,
    cell_metrics,
)
from harness.plan import Cell

AR = Cell("ar", "mini", 0.0, 1)
SD = Cell("sd", "mini", 0.0, 1)
SD_BATCH = Cell("sd", "mini", 0.0, 2)


def test_batch_counts_each_step_once(tmp_path):
    (data,) = cells(tmp_path, batch_of_two(SD_BATCH)).values()
    metrics = cell_metrics(data, devices=2)
    assert (metrics.requests, metrics.tokens) == (3, 9)
    assert metrics.tokens_per_s == pytest.approx(9 / 40e-9)
    assert metrics.tokens_per_s_per_device == pytest.approx(4.5 / 40e-9)
    assert metrics.acceptance_length == pytest.approx(9 / 7)
    assert metrics.acceptance_rate == 1.0  # B's two drafted tokens
    assert (metrics.ttft_ms.p50, metrics.ttft_ms.p95) == (210e-6, 210e-6)
    assert (metrics.tpot_ms.p50, metrics.tpot_ms.p95) == pytest.approx((10e-6, 10e-6))
    assert metrics.hit_rate is None
    assert (metrics.draft_ms, metrics.verify_ms, metrics.wait_ms) == (None, None, None)
    assert metrics.transfer_ms is None


def test_devices_unknown_leave_the_per_device_rate_open(tmp_path):
    (data,) = cells(tmp_path, batch_of_two(SD_BATCH)).values()
    assert cell_metrics(data, devices=None).tokens_per_s_per_device is None


def test_nothing_drafted_has_no_acceptance_rate(tmp_path):
    (data,) = cells(tmp_path, decode(AR, {A: one_token_rounds(A, 1, 2, 9)})).values()
    metrics = cell_metrics(data, devices=1)
    assert (metrics.acceptance_length, metrics.acceptance_rate) == (1.0, None)


def test_acceptance_counts_drafts_before_the_cut_and_tokens_after_it(tmp_path):
    script = {A: [emit(A, 1, 2, drafted=4, accepted=1), Round(A, (9,), 4, 3, finish=EOS)]}
    (data,) = cells(tmp_path, decode(SD, script)).values()
    metrics = cell_metrics(data, devices=1)
    assert metrics.acceptance_rate == pytest.approx(4 / 8)
    assert metrics.acceptance_length == pytest.approx(3 / 2)


def test_hit_rate_leaves_out_rounds_without_an_earlier_outcome(tmp_path):
    hit, miss = CacheOutcome.HIT, CacheOutcome.MISS
    outcomes = [None, hit, hit, miss]
    script = {A: [emit(A, 1, cache=c) for c in outcomes] + [emit(A, 9, finish=EOS, cache=hit)]}
    (data,) = cells(tmp_path, decode(SD, script)).values()
    assert cell_metrics(data, devices=1).hit_rate == pytest.approx(3 / 4)


def test_spans_shared_by_the_sequences_of_a_step_count_once(tmp_path):
    edges = {SpanKind.DRAFT: (1200, 1204), SpanKind.TRANSFER: (1204, 1205)}
    edges[SpanKind.VERIFY] = (1205, 1210)
    spans = tuple(Span(kind, *edge) for kind, edge in edges.items())
    script = {name: [emit(name, 9, finish=EOS, spans=spans)] for name in (A, B)}
    (data,) = cells(tmp_path, decode(SD_BATCH, script)).values()
    metrics = cell_metrics(data, devices=1)
    assert (metrics.draft_ms, metrics.verify_ms, metrics.wait_ms) == (4e-6, 5e-6, 0.0)
    assert metrics.transfer_ms == 1e-6


def test_tokens_of_a_round_arrive_together(tmp_path):
    # prefill 100 ns, steps that end at 110, 130, 170 and 250 ns
    script = {A: [emit(A, 1, 2), emit(A, 3), emit(A, 4, 5, 6), emit(A, 9, finish=EOS)]}
    times = [10, 20, 40, 80]
    (data,) = cells(tmp_path, decode(SD, script, step_ns=times.__getitem__)).values()
    metrics = cell_metrics(data, devices=1)
    # gaps of rounds 20, 40, 80; of tokens 0, 20, 40, 0, 0, 80
    assert (metrics.inter_round_ms.p50, metrics.inter_round_ms.p90) == (40e-6, 72e-6)
    assert metrics.inter_token_ms.p50 == 10e-6
    assert metrics.inter_token_ms.p90 == pytest.approx(60e-6)
    assert metrics.latency_ms == Percentiles(*[250e-6] * 4)
    assert (metrics.tpot_ms.p50, metrics.step_ms) == (pytest.approx(140e-6 / 6), 150e-6 / 4)
    assert metrics.peak_tokens_per_s == pytest.approx(2 / 10e-9)  # of the first step


def test_a_gap_holds_the_prefill_of_another_and_tpot_does_not(tmp_path):
    # two slots: B ends with the first step, C is then prefilled for 100 ns while A waits
    script = {
        A: one_token_rounds(A, 1, 2, 9),
        B: one_token_rounds(B, 9),
        C: one_token_rounds(C, 1, 9),
    }
    (data,) = cells(tmp_path, decode(SD_BATCH, script)).values()
    metrics = cell_metrics(data, devices=1)
    # A: 110, 10; C: 10
    assert (metrics.inter_token_ms.p50, metrics.inter_token_ms.p99) == (10e-6, 108e-6)
    assert metrics.tpot_ms == Percentiles(*[10e-6] * 4)


def test_percentiles_interpolate_between_requests(tmp_path):
    names = [f"mini/{i}/r0" for i in range(11)]
    script = {name: [emit(name, 9, finish=EOS)] for name in names}
    (data,) = cells(tmp_path, decode(AR, script, step_ns=lambda i: 10 * i)).values()
    # TTFT 100, 110, ... 200 ns: the quantile q lies at 100 + 100 q
    expected = (150e-6, 190e-6, 195e-6, 199e-6)
    assert cell_metrics(data, devices=1).ttft_ms == Percentiles(*map(pytest.approx, expected))


def test_acceptance_by_position_counts_rounds_that_reached_it():
    # 4 rounds draft 3 tokens and accept 3, 1, 0, 2; one drafts none (the end of the context)
    rounds = pd.DataFrame({"drafted": [3, 3, 3, 3, 0], "accepted": [3, 1, 0, 2, 0]})
    expected = ((1, 3 / 4, 4), (2, 2 / 3, 3), (3, 1 / 2, 2))
    assert acceptance_by_position(rounds) == tuple(PositionAcceptance(*row) for row in expected)
    assert acceptance_by_position(rounds.iloc[4:]) == ()
    assert acceptance_by_position(rounds.iloc[:0]) == ()


def test_cells_are_ordered_and_keep_their_own_rows(tmp_path):
    control = Cell("ar", "mini", 0.0, 1, control=True)
    results = [decode(cell, {A: one_token_rounds(A, 1, 9)}) for cell in (SD, control, AR)]
    found = cells(tmp_path, *results)
    assert list(found) == [AR, control, SD]
    assert all(len(data.requests) == 1 and len(data.rounds) == 2 for data in found.values())


def test_one_category_keeps_its_own_rounds(tmp_path):
    script = {A: one_token_rounds(A, 1, 9), B: [emit(B, 1, 2, 9, finish=EOS)]}
    (data,) = cells(tmp_path, decode(SD, script, categories=["chat", "code"])).values()
    assert cell_metrics(data.only("code"), None).acceptance_length == 3.0
    assert cell_metrics(data.only("chat"), None).acceptance_length == 1.0
