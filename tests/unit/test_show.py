"""What `harness show` prints below its tables."""

from itertools import pairwise

import pytest
from click.testing import CliRunner
from fake_decoding import EOS, decode, emit, one_token_rounds, stored

from harness.cli import cli
from harness.decoder import CacheOutcome, Span, SpanKind
from harness.plan import Cell

A = "mini/0/r0"
AR, SSD = Cell("ar", "mini", 0.0, 1), Cell("ssd", "mini", 0.0, 1)


def spans(build_ns, wait_ns, draft_ns, verify_ns):
    edges = [0, build_ns, build_ns + wait_ns, build_ns + wait_ns + draft_ns]
    kinds = (SpanKind.SPECULATE, SpanKind.WAIT, SpanKind.DRAFT, SpanKind.VERIFY)
    ends = pairwise([*edges, edges[-1] + verify_ns])
    return tuple(Span(kind, *edge) for kind, edge in zip(kinds, ends, strict=True))


def shown(tmp_path, *options, **diagnostics):
    """A run of AR and of SSD with a hit of 3 tokens and a miss of 1; T_v is 100 ms."""
    ms = 1_000_000
    ssd = [
        emit(A, 1, spans=spans(0, 0, 50 * ms, 100 * ms)),
        emit(A, 2, 3, 4, cache=CacheOutcome.HIT, spans=spans(125 * ms, 2 * ms, 0, 100 * ms)),
        emit(A, 5, cache=CacheOutcome.MISS, spans=spans(0, 0, 50 * ms, 100 * ms), finish=EOS),
    ]
    run = tmp_path / "run"
    decoders = {SSD.id: {"options": {}, "diagnostics": diagnostics}}
    stored(
        run,
        decode(AR, {A: one_token_rounds(A, *range(1, 6))}),
        decode(SSD, {A: ssd}, step_ns=[150 * ms, 125 * ms, 150 * ms].__getitem__),
        decoders=decoders,
    )
    result = CliRunner().invoke(cli, ["show", str(run), *options])
    assert result.exit_code == 0
    return " ".join(result.output.split())


def test_predicted_and_measured_speed(tmp_path):
    # 2 tokens a round in 0.5 * 1.25 + 0.5 * 1.5 verifications; 4 tokens in 275 ms
    assert (
        "ssd: predicted 14.5 tok/s, measured 14.5, efficiency 1.00 (h 0.50, - expected, E 3.00 on "
        "hits and 1.00 on misses, T_v 100.0 ms, T_p 1.25, T_b 0.50; hits waited 2% of T_v)"
    ) in shown(tmp_path)


def test_contention(tmp_path):
    told = shown(tmp_path, verify_idle_ms=100.0, verify_loaded_ms=125.0)
    assert (
        "ssd: a verification takes 100.0 ms alone, 125.0 ms beside the working draft (+25%)"
    ) in told


def test_a_degraded_cell_is_marked(tmp_path):
    told = shown(tmp_path, degraded="draft process 7: died")
    assert "ssd (degraded)" in told
    assert "warning: ssd/mini/t0/b1 is degraded" in told


def test_what_a_speedup_is_made_of(tmp_path):
    # 5 tokens in 5 steps of 10 ns against 5 in 3 of 425 ms: 5/3 the tokens a round
    assert "ssd over ar: 0.000 = 1.667 in tokens a round x 0.000 in speed of a round" in shown(
        tmp_path
    )


def test_latency_is_told_when_asked_for(tmp_path):
    # rounds of 150, 125 and 150 ms; of 5 tokens the first comes 100 ns of prefill later
    told = shown(tmp_path, "--latency")
    for row in (
        "ssd TTFT 150.00 150.00 150.00 150.00",
        "ssd between tokens 62.50 142.50 146.25 149.25",  # 125, 0, 0, 150
        "ssd between rounds 137.50 147.50 148.75 149.75",
        "ssd end to end 425.00 425.00 425.00 425.00",
        "ssd: accepted by position 100% 100%",
    ):
        assert row in told
    assert "between tokens" not in shown(tmp_path / "other")


def test_markdown_for_a_pull_request(tmp_path):
    told = shown(tmp_path, "--markdown")
    assert told.startswith("### run > warning: ")
    assert "| method | lossless | tok/s |" in told
    # 4 tokens in the two rounds of 275 ms behind the first; all 5 in 425 ms: 11.8 tokens/s
    assert "| ssd | unverified | 11.8 | - |" in told
    assert "- skip losslessness: unverified: no certificate" in told


def test_only_one_form_at_a_time(tmp_path):
    result = CliRunner().invoke(cli, ["show", str(tmp_path), "--json", "--markdown"])
    assert result.exit_code == 2
    assert "--json, --markdown and --latency: choose one of them" in result.output


HOSTILE = "[bold red]\x1b[2J\x07|<img src=x>`*_["


def hostile_run(tmp_path):
    cells = [Cell(method, HOSTILE, 0.0, 1) for method in ("ar", HOSTILE)]
    return stored(
        tmp_path / "run", *(decode(cell, {A: one_token_rounds(A, 1, 2)}) for cell in cells)
    )


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_hostile_names_are_inert(tmp_path, options):
    hostile_run(tmp_path)
    result = CliRunner().invoke(cli, ["show", str(tmp_path / "run"), *options])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "[bold red]" in result.output.replace("\\", "")
    if options:
        assert "\\|\\<img src=x\\>\\`\\*\\_\\[" in result.output


def test_colours_say_what_is_certain(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown(tmp_path)
    output = CliRunner().invoke(cli, ["show", str(tmp_path / "run")], color=True).output
    assert "\x1b[33munverified" in output
    assert "\x1b[32mpass" in output
