import pytest
from fake_decoding import EOS, decode, emit, one_token_rounds, stored

from harness.decoder import CacheOutcome, Round, Span, SpanKind
from harness.metrics import Percentiles, cell_metrics, speedup, split_cells
from harness.plan import Cell

A, B, C = (f"mini/{i}/r0" for i in range(3))
AR = Cell("ar", "mini", 0.0, 1)
SD = Cell("sd", "mini", 0.0, 1)
SD_BATCH = Cell("sd", "mini", 0.0, 2)
AR_BATCH = Cell("ar", "mini", 0.0, 2)


def cells(tmp_path, *results):
    run = stored(tmp_path / "run", *results)
    return {data.cell: data for data in split_cells(run.requests, run.rounds)}


def batch_of_two(cell):
    """9 tokens in 7 rounds, in 4 steps of 10 ns (see test_measure); TTFT 210, 210 and 110 ns."""
    script = {
        A: one_token_rounds(A, 1, 9),
        B: [emit(B, 1, 2), emit(B, 3, 4), emit(B, 9, finish=EOS)],
        C: one_token_rounds(C, 1, 9),
    }
    return decode(cell, script)


def test_batch_counts_each_step_once(tmp_path):
    (data,) = cells(tmp_path, batch_of_two(SD_BATCH)).values()
    metrics = cell_metrics(data, devices=2)
    assert (metrics.requests, metrics.tokens) == (3, 9)
    assert metrics.tokens_per_s == pytest.approx(9 / 40e-9)
    assert metrics.tokens_per_s_per_device == pytest.approx(4.5 / 40e-9)
    assert metrics.acceptance_length == pytest.approx(9 / 7)
    assert metrics.acceptance_rate == 1.0  # B's two drafted tokens
    assert metrics.ttft_ms == Percentiles(p50=210e-6, p95=210e-6)
    assert metrics.tpot_ms == Percentiles(p50=pytest.approx(10e-6), p95=pytest.approx(10e-6))
    assert metrics.hit_rate is None
    assert (metrics.draft_ms, metrics.verify_ms, metrics.wait_ms) == (None, None, None)


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
    spans = (Span(SpanKind.DRAFT, 1200, 1204), Span(SpanKind.VERIFY, 1204, 1210))
    script = {name: [emit(name, 9, finish=EOS, spans=spans)] for name in (A, B)}
    (data,) = cells(tmp_path, decode(SD_BATCH, script)).values()
    metrics = cell_metrics(data, devices=1)
    assert (metrics.draft_ms, metrics.verify_ms, metrics.wait_ms) == (4e-6, 6e-6, 0.0)


def test_speedup_is_the_ratio_of_total_times_on_the_same_prompts(tmp_path):
    # ar: 3 and 2 tokens, a step of 12 ns each: 60 ns; sd: 1 and 2 steps of 20 ns: 60 ns ...
    ar = decode(AR, {A: one_token_rounds(A, 1, 2, 9), B: one_token_rounds(B, 1, 9)}, step_ns=12)
    sd = decode(
        SD,
        {A: [emit(A, 1, 2, 9, finish=EOS)], B: one_token_rounds(B, 1, 9)},
        step_ns=20,
    )
    found = cells(tmp_path, ar, sd)
    estimate = speedup(found[SD], found[AR])
    # ... so that together they draw level: prompts 36/20 and 24/40, and a mean of ratios says 1.2
    assert (estimate.value, estimate.n) == (pytest.approx(1.0), 2)
    assert (estimate.low, estimate.high) == (pytest.approx(24 / 40), pytest.approx(36 / 20))


def test_speedup_uses_only_prompts_that_both_finished(tmp_path):
    ar = decode(AR, {A: one_token_rounds(A, 1, 9), B: one_token_rounds(B, 1, 9)})
    sd = decode(SD, {A: [emit(A, 1, 9, finish=EOS)], B: []}, refuses=[B])
    found = cells(tmp_path, ar, sd)
    estimate = speedup(found[SD], found[AR])
    assert (estimate.value, estimate.low, estimate.high, estimate.n) == (2.0, None, None, 1)


def test_repeats_of_a_prompt_are_one_observation(tmp_path):
    results = [
        decode(cell, {f"mini/0/r{r}": one_token_rounds(f"mini/0/r{r}", 1, 9)}, repeat=r, step_ns=ns)
        for cell, times in ((AR, (30, 50)), (SD, (10, 30)))
        for r, ns in enumerate(times)
    ]
    found = cells(tmp_path, *results)
    estimate = speedup(found[SD], found[AR])
    assert (estimate.value, estimate.n) == (pytest.approx(2.0), 1)  # (60 + 100) / (20 + 60)


def test_shares_of_a_batch_add_up_to_the_throughput_ratio(tmp_path):
    found = cells(tmp_path, batch_of_two(AR_BATCH), batch_of_two(SD_BATCH))
    assert speedup(found[SD_BATCH], found[AR_BATCH]).value == pytest.approx(1.0)
    alone = decode(AR, {name: one_token_rounds(name, 1, 9) for name in (A, B, C)})
    other = cells(tmp_path / "other", alone)[AR]
    # batch: 40 ns for 9 tokens; alone: 60 ns for 6
    assert speedup(found[SD_BATCH], other).value == pytest.approx((60 / 6) / (40 / 9))


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
