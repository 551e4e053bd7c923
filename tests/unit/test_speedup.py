"""The speedup of a cell over another and its factors, on rounds with known times."""

from fractions import Fraction
from math import prod, sqrt

import pytest
from fake_decoding import EOS, A, B, C, batch_of_two, cells, decode, emit, one_token_rounds

from harness.plan import Cell
from harness.speedup import speedup, throughput
from harness.statistics import Estimate

AR = Cell("ar", "mini", 0.0, 1)
SD = Cell("sd", "mini", 0.0, 1)
SD_BATCH = Cell("sd", "mini", 0.0, 2)
AR_BATCH = Cell("ar", "mini", 0.0, 2)


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


def test_the_geometric_mean_counts_every_prompt_alike(tmp_path):
    # prompts 36 / 20 and 24 / 40 as above: in total 1, as a geometric mean sqrt(1.8 * 0.6)
    ar = decode(AR, {A: one_token_rounds(A, 1, 2, 9), B: one_token_rounds(B, 1, 9)}, step_ns=12)
    sd = {A: [emit(A, 1, 2, 9, finish=EOS)], B: one_token_rounds(B, 1, 9)}
    found = cells(tmp_path, ar, decode(SD, sd, step_ns=20))
    assert speedup(found[SD], found[AR]).geometric_mean == pytest.approx(sqrt(1.08))


def test_factors_are_those_worked_out_by_hand(tmp_path):
    # ar: 5 tokens in 5 rounds of 12 ns; sd: 5 tokens in 3 rounds of 15 ns
    ar = decode(AR, {A: one_token_rounds(A, 1, 2, 9), B: one_token_rounds(B, 1, 9)}, step_ns=12)
    sd = {A: [emit(A, 1, 2, 9, finish=EOS)], B: one_token_rounds(B, 1, 9)}
    found = cells(tmp_path, ar, decode(SD, sd, step_ns=15))
    estimate = speedup(found[SD], found[AR])
    assert estimate.tokens_per_round == pytest.approx(5 / 3)
    assert estimate.time_per_round == pytest.approx(12 / 15)
    assert estimate.value == pytest.approx(60 / 45)


@pytest.mark.parametrize("step_ns", [3, 7, 10, 1_000_003])
def test_the_factors_multiply_to_the_speedup(tmp_path, step_ns):
    # a batch whose shares are no whole nanoseconds, against prompts of odd lengths, as fractions
    alone = {
        A: [emit(A, 1, 2, 3), emit(A, 4, 9, finish=EOS)],
        B: one_token_rounds(B, 1, 2, 3, 4, 5, 6, 9),
        C: [emit(C, 1, 9, finish=EOS)],
    }
    other = cells(tmp_path / "other", decode(AR, alone, step_ns=step_ns))[AR]
    ours = cells(tmp_path, batch_of_two(SD_BATCH))[SD_BATCH]
    estimate = speedup(ours, other)
    tokens = Fraction(9, 7) / Fraction(14, 10)
    time = Fraction(10 * step_ns, 10) / Fraction(40, 7)
    assert estimate.tokens_per_round == pytest.approx(float(tokens), rel=1e-14)
    assert estimate.time_per_round == pytest.approx(float(time), rel=1e-14)
    assert estimate.value == pytest.approx(float(tokens * time), rel=1e-14)
    factors = estimate.tokens_per_round, estimate.time_per_round
    assert prod(factors) == pytest.approx(estimate.value, rel=1e-14)


def test_nothing_in_common_is_no_speedup(tmp_path):
    ar, sd = decode(AR, {A: one_token_rounds(A, 9)}), decode(SD, {B: one_token_rounds(B, 9)})
    found = cells(tmp_path, ar, sd)
    estimate = speedup(found[SD], found[AR])
    assert (estimate.value, estimate.n, estimate.geometric_mean) == (None, 0, None)


def test_throughput_is_over_all_prompts_of_all_cells_repeats_together(tmp_path):
    # 9 tokens in 4 steps of 10 ns; then the first two prompts of another dataset: 5 in 24 ns
    other = Cell("sd", "own", 0.0, 2)
    x, y = "own/0/r0", "own/1/r0"
    script = {x: one_token_rounds(x, 1, 9), y: [emit(y, 1, 2), emit(y, 9, finish=EOS)]}
    found = cells(tmp_path, batch_of_two(SD_BATCH), decode(other, script, step_ns=12))
    estimate = throughput(list(found.values()))
    assert estimate.value == pytest.approx((9 + 5) / (40 + 24) * 1e9)
    assert estimate.n == 5
    assert throughput([]) == Estimate(None, None, None, 0)
