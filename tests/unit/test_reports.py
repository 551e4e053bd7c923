"""The parts of a report that are worked out without a page: words, numbers, charts."""

from __future__ import annotations

import re

import pandas as pd
import pytest
from pydantic import TypeAdapter

from harness.checks import Status
from harness.statistics import Estimate
from reports import provenance, verdict
from reports.checks import check_views
from reports.colours import method_styles, to_css
from reports.figures import IntervalRow, RoundTime, draw_intervals, draw_round_times
from reports.results import CellResult, CheckResult, RunResult
from reports.svg import inline_svg, new_figure, style
from reports.tables import interval_text, parts_rows, table_rows
from reports.timeline import middle_excerpts

NONE = {"p50": None, "p90": None, "p95": None, "p99": None}
METHODS = ("ar", "sd", "ssd", "tree", "amusd", "pearl")
TIMES = ("tpot_ms", "ttft_ms", "latency_ms", "inter_token_ms", "inter_round_ms")


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value, low, high, 8)


def cell(method: str, dataset: str = "d", **fields: object) -> CellResult:
    empty: dict[str, object] = {
        **dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "peak_tokens_per_s")),
        **dict.fromkeys(("acceptance_length", "acceptance_rate", "hit_rate")),
        **dict.fromkeys(("step_ms", "draft_ms", "verify_ms", "wait_ms", "transfer_ms")),
        **dict.fromkeys(("verified", "degraded", "prediction", "contention", "energy")),
        **dict.fromkeys(TIMES, NONE),
        "acceptance_by_position": (),
        "requests": 8,
        "tokens": 80,
        "speedup": {},
        "categories": {},
        "control": False,
        "untuned": False,
        "automatic": False,
        "temperature": 0.0,
        "batch_size": 1,
    }
    values = empty | {"method": method, "dataset": dataset} | fields
    return TypeAdapter(CellResult).validate_python(values)


def check(name: str, status: Status, *ties: bool) -> CheckResult:
    divergences = tuple({"tie": tie} for tie in ties)
    return CheckResult(name=name, status=status, detail="", cell=None, divergences=divergences)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (estimate(1.72, 1.65, 1.79), "1.72x [1.65, 1.79] as fast as AR"),
        (estimate(0.80, 0.75, 0.85), "0.80x [0.75, 0.85] as fast as AR"),
        (
            estimate(1.04, 0.99, 1.09),
            "with no measurable difference in speed from AR (1.04x [0.99, 1.09])",
        ),
        (
            estimate(1.04, 1.0, 1.09),
            "with no measurable difference in speed from AR (1.04x [1.00, 1.09])",
        ),
        (estimate(1.9), "1.90x as fast as AR (one prompt, too few for an interval)"),
    ],
)
def test_a_speedup_claims_no_more_than_its_interval(found: Estimate, words: str) -> None:
    assert plain(verdict.compare("ar", [verdict.Comparison("d", found)])) == words


def test_several_datasets_are_given_as_a_range_with_the_undecided_counted() -> None:
    comparisons = [
        verdict.Comparison("chat", estimate(1.02, 0.97, 1.07)),
        verdict.Comparison("code", estimate(1.90, 1.80, 2.00)),
        verdict.Comparison("math", estimate(1.50, 1.40, 1.60)),
    ]
    assert plain(verdict.compare("sd", comparisons)) == (
        "from 1.02x [0.97, 1.07] (chat) to 1.90x [1.80, 2.00] (code) as fast as SD "
        "(no measurable difference on 1 of 3 datasets)"
    )


def test_the_headline_is_about_the_cached_method_at_the_smallest_setting() -> None:
    faster = {"ar": {"value": 3.0, "low": 2.9, "high": 3.1, "n": 8}}
    slower = {"ar": {"value": 2.0, "low": 1.9, "high": 2.1, "n": 8}}
    cells = [
        cell("ar", tokens_per_s=10.0),
        cell("tree", tokens_per_s=30.0, speedup=faster),
        cell("ssd", tokens_per_s=20.0, speedup=slower, hit_rate=0.8),
        cell("ssd", tokens_per_s=90.0, speedup=faster, hit_rate=0.8, batch_size=4),
    ]
    assert plain(verdict.speed_sentence("pair", cells)) == (
        "On pair at temperature 0 and batch size 1, SSD decodes 2.00x [1.90, 2.10] as fast as AR."
    )


@pytest.mark.parametrize(
    ("checks", "start"),
    [
        ([check("g", Status.PASS)], "Greedy outputs are identical to AR's in every prompt"),
        ([check("g", Status.TIE, True, True)], "Greedy outputs are identical to AR's but for 2"),
        ([check("g", Status.FAIL, True, False)], "Not shown to be lossless: 1 greedy output "),
        ([check("g", Status.SKIP)], "Nothing in this run says"),
        ([], ""),
    ],
)
def test_greedy_sentence(checks: list[CheckResult], start: str) -> None:
    sentence = verdict.greedy_sentence(checks)
    assert sentence.startswith(start)
    assert bool(sentence) == bool(start)


@pytest.mark.parametrize(
    ("statuses", "start"),
    [
        ([Status.PASS, Status.PASS], "Sampled outputs follow the target's distribution in all 2"),
        ([Status.PASS, Status.FAIL], "Not lossless: 1 of 2 tests of sampled outputs failed"),
        ([Status.SKIP], "Whether sampled outputs follow the target's distribution was not tested"),
    ],
)
def test_sampled_sentence(statuses: list[Status], start: str) -> None:
    checks = tuple(check("losslessness", status) for status in statuses)
    sampled = RunResult(cells=(cell("sd", temperature=1.0),), checks=checks, warnings=())
    assert verdict.sampled_sentence(sampled).startswith(start)
    greedy = RunResult(cells=(cell("sd"),), checks=checks, warnings=())
    assert verdict.sampled_sentence(greedy) == ""


def test_a_failed_control_is_in_the_verdict() -> None:
    result = RunResult(cells=(cell("ar"),), checks=(check("aa_control", Status.FAIL),), warnings=())
    assert "AR measured twice differed from itself" in verdict.sentences("pair", result)[-1]


def test_the_badge_of_a_check_is_that_of_its_worst_cell() -> None:
    checks = [check("greedy_equality", each) for each in (Status.PASS, Status.TIE, Status.PASS)]
    result = RunResult(cells=(), checks=tuple(checks), warnings=())
    (view,) = check_views(result)
    assert (view.badge, view.summary) == ("TIE", "1 tie, 2 pass")


def test_the_timeline_shows_the_middle_of_the_longest_shared_request() -> None:
    requests = pd.DataFrame(
        {
            "item": ["sd/i", "sd/i", "ssd/i"],
            "method": ["sd", "sd", "ssd"],
            "control": False,
            "temperature": 0.0,
            "batch_size": 1,
            "request_id": ["short", "alone", "short"],
            "output_tokens": [10, 99, 10],
        }
    )
    span = {"kind": "verify", "start_ns": 3_000_000, "end_ns": 4_000_000}
    rows = [
        (item, request, number, number * 1_000_000, (number + 1) * 1_000_000, 2, 4, None, [span])
        for item, request in (("sd/i", "short"), ("sd/i", "alone"), ("ssd/i", "short"))
        for number in range(6)
    ]
    columns = ["item", "request_id", "round", "start_ns", "end_ns", "emitted", "drafted"]
    table = pd.DataFrame(rows, columns=[*columns, "cache", "spans"])
    found = middle_excerpts(requests, table, count=2)
    assert [(each.method, each.request_id) for each in found] == [("sd", "short"), ("ssd", "short")]
    assert [each.start_ms for each in found[0].rounds] == [0.0, 1.0]  # rounds 2 and 3 of 6
    assert found[0].rounds[0].stretches[0][1:] == (1.0, 2.0)
    assert found[0].tokens == 4


def test_known_methods_keep_their_colour_and_strangers_get_others() -> None:
    few, many = method_styles(["ssd"]), method_styles(["ar", "sd", "ssd", *"vwxyz"])
    assert few["ssd"] == many["ssd"]
    assert len({each.variable for each in many.values()}) == 8
    assert len({each.shape for each in many.values()}) == 8
    more = method_styles("abcdefghij")  # than there are colours
    assert more["i"].variable == more["a"].variable
    assert len(set(more.values())) == 10
    assert len(set(method_styles([*METHODS, *"abcdefghij"]).values())) == 16
    assert to_css(f'fill="{many["sd"].colour}"') == 'fill="var(--method-2)"'


def test_a_thin_bar_keeps_its_colour() -> None:
    thin, thick = 0.5, 99.0  # milliseconds: a pixel and a half of 280, were it not for its edge
    row = RoundTime("ssd", {"verify": thick, "transfer": thin})
    with style():
        bars = draw_round_times([row]).axes[0].patches
    assert [(bar.get_width(), bar.get_linewidth()) for bar in bars] == [(thick, 0.8), (thin, 0.0)]


def test_names_cannot_leave_their_text_in_a_chart() -> None:
    name = '</text><script>x</script>font-family: a; #0a0001 id="y" $\\frac{1}{2}$'
    rows = [IntervalRow(name, "sd", estimate(1.5, 1.4, 1.6))]
    with style():
        figure = draw_intervals(rows, method_styles(["sd"]), name)
        svg = str(inline_svg(figure, "k", name, name))
    assert "<script" not in svg
    assert svg.count("</text>") == svg.count("<text ")
    assert 'font-family: a; #0a0001 id="y" $\\frac{1}{2}$' in svg
    assert re.match(r'<svg viewBox="[\d. ]+" role="img" aria-labelledby="k-title k-desc"', svg)


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib
    from matplotlib import pyplot

    settings = ("svg.fonttype", "svg.hashsalt", "font.size", "text.color", "text.parse_math")
    before = [matplotlib.rcParams[name] for name in settings]
    with style():
        inline_svg(new_figure(100), "k", "", "")
    assert [matplotlib.rcParams[name] for name in settings] == before
    assert pyplot.get_fignums() == []


def test_table_shows_what_is_missing_as_missing() -> None:
    speedup = {"ar": {"value": 1.5, "low": 1.4, "high": 1.6, "n": 8}}
    ttft = {"p50": 9.96, "p90": 19, "p95": 20, "p99": 21}
    rows = table_rows(
        [
            cell("sd", tokens_per_s=1234.56, speedup=speedup, ttft_ms=ttft),
            cell("ar", control=True, tokens_per_s=float("nan")),
            cell("ar", dataset="e"),
        ],
        method_styles(["ar", "sd"]),
    )
    assert rows[0].values[0] == ("1,234.6", "")
    assert rows[0].values[2] == ("1.50x", "[1.40, 1.60]")
    assert rows[0].values[7] == ("10.0", "20.0")
    assert rows[1].method == "ar (A/A)"
    assert set(rows[1].values) == {None}
    assert [row.opens_group for row in rows] == [True, False, True]
    assert interval_text(estimate(2.0)) == "2.00"


def test_parts_of_a_speedup_and_percentiles() -> None:
    over = {"value": 1.5, "low": None, "high": None, "n": 8, "geometric_mean": 1.449}
    over |= {"tokens_per_round": 3.0, "time_per_round": 0.5}
    gaps = {"p50": 0.0, "p90": 19.04, "p95": 1200, "p99": 1300}
    energy = {"joules_per_token": 0.254, "watts": 9.0, "sources": ("gpu 0",)}
    sd = cell("sd", speedup={"ar": over}, inter_token_ms=gaps, energy=energy)
    rows = parts_rows([sd, cell("ar")], method_styles(["ar", "sd"]))
    assert rows[0].values[2] == ("0.0", "19.0 · 1,200.0 · 1,300.0")
    assert [value and value.main for value in rows[0].values[5:]] == [
        "3.00",
        "0.50",
        "1.45",
        "0.25",
    ]
    assert set(rows[1].values) == {None}


def test_an_empty_manifest_still_has_words() -> None:
    assert provenance.pair_name({}) == "unnamed pair"
    assert provenance.machine_name({}) == "unknown machine"
    assert provenance.revision({"git": {"revision": None, "dirty": None}}) == "revision unknown"
    assert provenance.command({"command": ["harness", "run", "--out", "a b"]}) == (
        "harness run --out 'a b'"
    )
    assert list(provenance.sources({})) == []
    assert list(provenance.facts({})) == [("machine", "unknown machine")]
    placed = {"target_devices": ["cuda:0", "cuda:1"], "draft_device": "cuda:1", "shared": True}
    cores = {"target_cores": [0], "draft_cores": [1, 2]}
    told = dict(provenance.facts({"fingerprint": {"placement": cores}}))
    assert told["devices"] == "target on core 0, draft process on cores 1, 2"
    told = dict(provenance.facts({"fingerprint": {"placement": placed | cores}}))
    draft = "draft process on cuda:1 (cores 1, 2) (shared)"
    assert told["devices"] == f"target on cuda:0, cuda:1 (core 0), {draft}"
    several = {"draft_device": "cpu,cpu"} | cores
    told = dict(provenance.facts({"fingerprint": {"placement": several}}))
    assert told["devices"] == "target on core 0, 2 draft processes on cores 1, 2"
    gpus = {"fingerprint": {"gpus": [{"name": "H100"}, {"name": "H100"}]}}
    assert provenance.machine_name(gpus) == "2 x H100"
