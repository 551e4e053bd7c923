"""Reports of the kinds of run that are easily got wrong: huge, tiny, partly failed, unverified."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import METHODS, TOKENS, Method, Page, cell, write_run

from harness.conditions import Conditions
from harness.counters import CpuTimes
from harness.plan import Cell
from harness.store import RunStore
from reports.page import build

BESIDE = {"lookahead": 4, "devices": 2, "wait_ms": 5, "transfer_ms": 1}
GRID: dict[str, Method] = {  # each emits so many tokens in every round
    "ar": Method((1,)),
    "sd": Method((3,), draft_ms=40, lookahead=4),
    "ngram": Method((2,), draft_ms=1, lookahead=4),
    "tree": Method((4,), verify_ms=120, draft_ms=60, lookahead=12),
    "hf": Method((3,), verify_ms=130, draft_ms=50, lookahead=4),
    "amusd": Method((4,), **BESIDE),
    "pearl": Method((4,), verify_ms=104, **BESIDE),
    "ssd": Method((4,), verify_ms=108, speculate_ms=60, **BESIDE),
}
DATASETS = ("humaneval", "gsm8k", "alpaca", "ultrafeedback")
BATCHES = (1, 2, 4, 6, 8)


def page(folder: Path, cells: list[Cell], **options: Any) -> Page:
    return Page(build([write_run(folder / "run", cells, **options)], folder / "report.html"))


def table_rows(report: Page) -> list[list[str]]:
    """The entries of each row of the table of every cell, each as one line of text."""
    table = report.html.partition('aria-label="Results of every cell"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr.*?</tr>", table.partition("<tbody>")[2], re.DOTALL)
    return [
        [" ".join(re.sub(r"<[^>]+>", " ", entry).split()) for entry in re.split(r"</t[hd]>", row)]
        for row in rows
    ]


def speed(method: Method) -> float:
    """Tokens a second. Spans are 2% longer on average, a round has 1 ms beside them.

    With a cache, rounds 4, 8, ... of a request are misses that wait four times as long.
    """
    rounds = TOKENS // method.emitted[0]
    misses = (rounds - 1) // 4 if method.speculate_ms else 0
    spans_ms = method.verify_ms + method.draft_ms + method.wait_ms + method.transfer_ms
    return TOKENS / (1e-3 * (1.02 * (rounds * spans_ms + misses * 3 * method.wait_ms) + rounds))


def grid_run(directory: Path) -> Path:
    """8 methods, 4 datasets and 5 batch sizes, with an A/A control in each group."""
    cells = [
        cell(method, dataset, batch_size=size, control=control)
        for dataset, size, method in product(DATASETS, BATCHES, GRID)
        for control in ([False, True] if method == "ar" else [False])
    ]
    return write_run(directory, cells, methods=GRID, prompts=10)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("grid")
    return Page(build([grid_run(folder / "run")], folder / "report.html"))


@pytest.mark.slow
def test_every_cell_of_a_large_run_has_its_row_with_its_figures(grid: Page) -> None:
    rows = table_rows(grid)
    assert len(rows) == (8 + 1) * 4 * 5
    found = {tuple(row[:4]): row for row in rows}
    for dataset, size, method in product(DATASETS, BATCHES, GRID):
        row = found[f"{method} unverified", dataset, "0", str(size)]
        assert float(row[4]) == pytest.approx(speed(GRID[method]), rel=0.01)
        assert float(row[5]) == pytest.approx(float(row[4]) / GRID[method].devices, abs=0.06)
        if method != "ar":
            over_ar = float(row[4]) / float(found["ar unverified", dataset, "0", str(size)][4])
            assert float(row[6].split("x")[0]) == pytest.approx(over_ar, rel=0.015)


@pytest.mark.slow
def test_a_large_run_is_a_page_that_can_be_read(grid: Page) -> None:
    assert len(grid.html) < 5_000_000
    assert not re.search(r"\b(nan|inf|None)\b", grid.text, re.IGNORECASE)
    panels = {
        unescape(heading): section.count("<svg ")
        for heading, section in re.findall(
            r"<section>\s*<h2>(.*?)</h2>(.*?)</section>", grid.html, re.DOTALL
        )
    }
    assert panels["Latency and throughput"] == 2 * 4  # both views of each dataset
    assert panels["Speedup by dataset"] == 2 * 5  # over AR and over SD at each batch size
    assert panels["Cache hit rate"] == 5
    assert panels["Acceptance by position"] == 1
    assert panels["A few rounds, as they happened"] == 7  # all but AR
    assert panels["Where a round's time goes"] == 4 * 5
    legend = grid.html.partition("<h2>Latency and throughput</h2>")[2].partition("</ul>")[0]
    looks = re.findall(r'color: var\((--method-\d)\)" aria-hidden="true">(.)</span> (\w+)', legend)
    assert {name for *_, name in looks} == set(GRID)
    assert len({look[:2] for look in looks}) == 8
    # 48 tokens in 12 rounds of 114 ms and 2 longer by 15, with what is beside: 1.438 s; AR's 4.944
    claim = r"SSD decodes from 3\.4\dx .* to 3\.4\dx \S+ \S+ \(\w+\) as fast as AR"
    assert re.search(claim, grid.text)


@pytest.mark.slow
def test_a_large_runs_checks_are_folded_and_its_table_scrolls(grid: Page) -> None:
    checks = grid.html.partition("<h2>Checks</h2>")[2].partition("</section>")[0]
    assert "<summary>176 pass</summary>" in checks  # greedy outputs, AR's at batch size 1 apart
    assert checks.count("<details") == 2  # these and the A/A controls
    assert 'class="scroll tall"' in grid.html


def test_a_single_cell(tmp_path: Path) -> None:
    report = page(tmp_path, [cell("sd")], prompts=1, methods={"sd": GRID["sd"]})
    (row,) = table_rows(report)
    assert row[:4] == ["sd unverified", "humaneval", "0", "1"]
    # 16 rounds of 3 tokens, 140 ms and up to 4% each, and 1 ms
    assert 3 / 0.1466 <= float(row[4]) <= 3 / 0.141
    assert row[6:8] == ["–", "–"]  # nothing to compare it with
    told = "no two methods were measured on the same prompts, so no speedup is known"
    assert told in report.text
    assert "1 prompt; intervals from fewer than 10 mislead" in report.text
    assert "Speedup by dataset" not in report.headings
    assert "Latency and throughput" not in report.headings
    assert "Where a round's time goes" in report.headings
    assert not re.search(r"\b(nan|inf|None)\b", report.text, re.IGNORECASE)
    assert report.is_inert


def test_a_run_with_failed_cells_tells_what_it_has_and_names_the_rest(tmp_path: Path) -> None:
    lost = [f"ssd/humaneval/t0/b1/r0/k{block}" for block in range(3)]
    died = "draft process 7: died (killed by SIGKILL)"
    failures = [{"item": item, "error": "DraftProcessError", "message": died} for item in lost]
    cells = [cell("ar"), cell("ar", control=True), cell("sd")]
    report = page(tmp_path, cells, prompts=12, status="failed", failures=failures)
    at_top = report.text.partition(" Checks ")[0]
    assert "the run is failed: the figures cover the items measured so far" in at_top
    assert f"{lost[0]} and 2 more items failed: DraftProcessError: {died}" in at_top
    assert re.search(r"SD decodes [\d.]+x \[[\d., ]+\] as fast as AR\.", at_top)
    assert [row[0] for row in table_rows(report)] == [
        "ar unverified",
        "ar (A/A) unverified",
        "sd unverified",
    ]
    listed = report.text.partition("Failed work items")[2].partition("To reproduce")[0]
    assert [item for item in lost if item in listed] == lost
    assert "SSD decodes" not in report.text


def test_noise_a_failed_control_and_loops_are_told_at_the_top(tmp_path: Path) -> None:
    methods = {name: replace(METHODS[name], loops=True) for name in ("ar", "sd")}
    methods["ar@control"] = replace(methods["ar"], verify_ms=120)
    cells = [cell("ar"), cell("ar", control=True), cell("sd")]
    run = write_run(tmp_path / "run", cells, prompts=12, methods=methods)
    shared = CpuTimes(busy_s=10.0, steal_s=1.0, cores=2)  # 1 of 20 core-seconds
    own = {"own_s": 10.0, "quota_s": None, "throttles": None, "frequency_mhz": None}
    conditions = Conditions(f"{cell('sd').id}/r0/k0", 10.0, shared, shared, **own)
    RunStore.open(run).record_conditions(conditions)
    at_top = Page(build([run], tmp_path / "report.html")).text.partition(" Checks ")[0]
    assert "Beware: AR measured twice differed from itself" in at_top
    told = "a hypervisor took CPU time from the run's cores (steal), up to 5.0%: sd/humaneval/t0/b1"
    assert told in at_top
    assert "36 of 36 outputs end in a loop, which flatters acceptance" in at_top


def test_an_unverified_run_claims_no_losslessness(tmp_path: Path) -> None:
    methods = ("ar", "sd", "ssd")
    sampled = [cell(method, temperature=1.0) for method in methods]
    report = page(tmp_path, sampled, prompts=12, methods={name: METHODS[name] for name in methods})
    told = "Whether sampled outputs follow the target's distribution was not tested."
    assert told in report.text.partition(" Checks ")[0]
    assert [row[0] for row in table_rows(report)] == [f"{name} unverified" for name in methods]
    check = report.text.partition("SKIPPED Outputs follow the target's distribution")[2]
    assert check.split(" FAIL ")[0].startswith(
        " unverified: no certificate; harness verify RUN makes one"
    )
    assert not re.search(r"\b(lossless|identical)\b", report.text)
