"""The speed formula on hand-made rounds; every expected value is worked out in the test."""

import subprocess
import sys
from itertools import pairwise

import pytest
from fake_decoding import EOS, decode, emit, one_token_rounds, stored

from harness.decoder import CacheOutcome, Span, SpanKind
from harness.plan import Cell
from harness.prediction import predict_cell
from harness.summary import summarise

HIT, MISS = CacheOutcome.HIT, CacheOutcome.MISS
SPECULATE, WAIT, DRAFT, VERIFY = SpanKind.SPECULATE, SpanKind.WAIT, SpanKind.DRAFT, SpanKind.VERIFY
A, B = "mini/0/r0", "mini/1/r0"
SSD = Cell("ssd", "mini", 0.0, 1)
PAIRED = Cell("ssd", "mini", 0.0, 2)


def spans(speculate, wait, draft, verify):
    """Consecutive spans of these lengths in ns; where they lie does not matter here."""
    ends = [0, speculate, speculate + wait, speculate + wait + draft]
    edges = [*ends, ends[-1] + verify]
    kinds = (SPECULATE, WAIT, DRAFT, VERIFY)
    return tuple(Span(k, *edge) for k, edge in zip(kinds, pairwise(edges), strict=True))


FIRST = spans(0, 0, 300, 100)
HITS = spans(110, 4, 10, 100), spans(130, 6, 0, 100)  # builds of 120 and 130
MISSED = spans(90, 10, 50, 100)

ONE = [
    emit(A, 1, 2, 3, spans=FIRST),
    emit(A, 4, 5, 6, 7, cache=HIT, hit_chance=0.8, drafted=3, accepted=3, spans=HITS[0]),
    emit(A, 8, cache=MISS, hit_chance=0.3, drafted=2, accepted=0, spans=MISSED),
    emit(A, 9, 10, cache=HIT, drafted=3, accepted=1, spans=HITS[1], finish=EOS),
]
DURATIONS = (400, 120, 170, 130)


def rounds(tmp_path, cell, script, durations):
    return stored(tmp_path / "run", decode(cell, script, step_ns=durations.__getitem__)).rounds


def test_one_sequence(tmp_path):
    found = predict_cell(rounds(tmp_path, SSD, {A: ONE}, DURATIONS))
    assert found.steps == 3  # the first round is left out
    assert found.hit_rate == pytest.approx(2 / 3)
    assert found.expected_hit_rate == pytest.approx((0.8 + 0.3) / 2)  # one round told nothing
    assert (found.tokens_on_hit, found.tokens_on_miss) == (3.0, 1.0)
    assert found.verify_ms == pytest.approx(100e-6)
    assert found.build_time == pytest.approx(1.25)  # (120 + 130) / 2 in 100 ns
    assert found.backup_time == pytest.approx(0.5)
    assert found.wait_on_hit == pytest.approx(0.10)  # 14 and 6 ns of 100
    # (2/3 * 3 + 1/3 * 1) tokens in (2/3 * 1.25 + 1/3 * 1.5) verifications of 100 ns
    assert found.predicted_tokens_per_s == pytest.approx((7 / 3) / (4 / 3) / 100e-9)
    assert found.measured_tokens_per_s == pytest.approx(7 / 420e-9)
    assert found.efficiency == pytest.approx(7 / 420e-9 / (7 / 4 / 100e-9))


def test_tokens_expected_from_acceptance(tmp_path):
    found = predict_cell(rounds(tmp_path, SSD, {A: ONE}, DURATIONS))
    # hits: 3 of 3, then 1 accepted and the second rejected: 4 of 5 decisions, K = 3 both times
    assert found.expected_on_hit == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert found.expected_on_miss == 1.0  # nothing was ever accepted


def test_a_build_that_fits_beside_the_verification_costs_nothing(tmp_path):
    body = [emit(A, 1, 2, cache=HIT, spans=spans(60, 0, 0, 100)) for _ in range(3)]
    script = {A: [emit(A, 0, spans=FIRST), *body, emit(A, 9, finish=EOS, spans=FIRST)]}
    found = predict_cell(rounds(tmp_path, SSD, script, (400, 100, 100, 100, 400)))
    assert (found.hit_rate, found.build_time) == (1.0, pytest.approx(0.6))
    assert found.predicted_tokens_per_s == pytest.approx(2 / 100e-9)
    assert found.efficiency == pytest.approx(1.0)
    assert found.tokens_on_miss is found.backup_time is found.expected_on_miss is None


def test_a_cache_that_never_hits_is_plain_speculative_decoding(tmp_path):
    body = [emit(A, 1, 2, cache=MISS, spans=spans(90, 0, 50, 100)) for _ in range(2)]
    script = {A: [emit(A, 0, spans=FIRST), *body, emit(A, 9, finish=EOS, spans=FIRST)]}
    found = predict_cell(rounds(tmp_path, SSD, script, (400, 160, 160, 400)))
    assert found.predicted_tokens_per_s == pytest.approx(2 / 150e-9)
    assert found.efficiency == pytest.approx(150 / 160)
    assert found.tokens_on_hit is found.build_time is found.wait_on_hit is None


def test_sequences_together_stall_when_either_misses(tmp_path):
    both, stall = spans(100, 0, 0, 100), spans(100, 0, 50, 100)
    script = {
        A: [
            emit(A, 1, spans=FIRST),
            emit(A, 1, 2, 3, cache=HIT, spans=both),
            emit(A, 1, 2, 3, cache=HIT, spans=stall),
            emit(A, 9, cache=HIT, spans=both, finish=EOS),
        ],
        B: [
            emit(B, 1, spans=FIRST),
            emit(B, 1, 2, 3, cache=HIT, spans=both),
            emit(B, 9, cache=MISS, spans=stall, finish=EOS),
        ],
    }
    found = predict_cell(rounds(tmp_path, PAIRED, script, (400, 100, 150, 100)))
    assert found.steps == 3
    assert found.hit_rate == pytest.approx(4 / 5)
    assert (found.tokens_on_hit, found.tokens_on_miss) == (2.5, 1.0)
    assert found.backup_time == pytest.approx(0.5)
    tokens = 0.8 * 2.5 + 0.2 * 1.0
    two, alone = 0.64 + 0.36 * 1.5, 0.8 + 0.2 * 1.5  # verifications a step of 2 and of 1 takes
    expected = (2 * 2 * tokens + tokens) / (2 * two + alone) / 100e-9
    assert found.predicted_tokens_per_s == pytest.approx(expected)
    assert found.measured_tokens_per_s == pytest.approx(11 / 350e-9)


def test_a_step_with_a_first_round_is_left_out_whole(tmp_path):
    script = {
        A: [emit(A, 1, spans=FIRST), emit(A, 9, cache=HIT, spans=HITS[0], finish=EOS)],
        B: [emit(B, 1, spans=FIRST), emit(B, 9, spans=HITS[0], finish=EOS)],
    }
    assert predict_cell(rounds(tmp_path, PAIRED, script, (400, 100))) is None


def test_no_prediction_without_a_cache(tmp_path):
    script = {A: one_token_rounds(A, 1, 2, 9)}
    assert predict_cell(rounds(tmp_path, SSD, script, (10, 10, 10))) is None


def test_a_summary_has_it_where_there_is_one(tmp_path):
    ar = Cell("ar", "mini", 0.0, 1)
    results = (
        decode(ar, {A: one_token_rounds(A, *range(1, 11))}),
        decode(SSD, {A: ONE}, step_ns=DURATIONS.__getitem__),
    )
    plain, cached = summarise(stored(tmp_path / "run", *results))["cells"]
    assert plain["prediction"] is None
    assert cached["prediction"]["hit_rate"] == pytest.approx(2 / 3)
    assert cached["prediction"].keys() >= {"efficiency", "predicted_tokens_per_s", "wait_on_hit"}


def test_the_formulas_bring_no_torch():
    code = "import sys, harness.prediction; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
