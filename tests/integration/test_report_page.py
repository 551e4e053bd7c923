"""Pages built from run directories that the real store wrote."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up_runs import HOSTILE, METHODS, Method, Page, cell, write_run

from harness.commands.show import print_run
from harness.plan import Cell
from reports.page import build

FIGURES = {
    "Speedup by dataset",
    "Latency and throughput",
    "Where a round's time goes",
    "A few rounds, as they happened",
    "Acceptance by position",
}


def page(directory: Path, *cells: Cell, **options: Any) -> Page:
    run = write_run(directory / "run", list(cells), **options)
    return Page(build([run], directory / "report.html"))


def full_run() -> list[Cell]:
    return [cell("ar"), cell("ar", control=True), cell("sd"), cell("ssd")]


def test_page_says_what_the_run_shows_in_order(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run(), prompts=12)
    assert report.headings == [
        "Checks",
        "Every cell",
        "Latency and throughput",
        "Speedup by dataset",
        "Acceptance by position",
        "Cache hit rate",
        "Where a round's time goes",
        "A few rounds, as they happened",
        "Latency, and the parts of a speedup",
        "Predicted against measured",
        "To reproduce",
    ]
    assert "AMD EPYC 9R14, 2 cores" in report.text
    assert "revision 0123456789ab" in report.text
    interval = r"\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]"
    claim = rf"SSD decodes {interval} as fast as AR and {interval} as fast as SD\."
    assert re.search(claim, report.text)
    assert "Greedy outputs are identical to AR's in every prompt" in report.text
    assert "harness run --methods ssd,sd,ar --out 'my runs/r1'" in report.text
    assert "a" * 64 in report.text
    assert "c" * 64 in report.text


def test_page_is_self_contained(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run())
    assert report.is_inert
    assert "link" not in report.elements
    references = report.values("src", "href", "xlink:href")
    assert sum(reference.startswith("data:") for reference in references) == 3  # downloads
    assert all(reference.startswith(("#", "data:")) for reference in references)
    assert not re.search(r"url\((?!#)|@import", report.html)
    assert len(report.html) < 1_000_000


def test_every_id_is_unique_and_every_chart_is_described(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, full_run()) for name in ("a", "b")]
    report = Page(build(runs, tmp_path / "two.html"))
    ids, labels = report.values("id"), report.values("aria-labelledby")
    assert len(ids) == len(set(ids))
    assert len(labels) == report.elements.count("svg") > 0
    assert {part for label in labels for part in label.split()} <= set(ids)
    inside = {link[1:] for link in report.values("href", "xlink:href") if link.startswith("#")}
    assert inside <= set(ids)


def test_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", full_run())
    first = build([run], tmp_path / "first.html").read_bytes()
    assert build([run], tmp_path / "deeper" / "second.html").read_bytes() == first


def test_hostile_names_errors_and_paths_are_inert(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'{{7*7}}$x$"  # ids hold no "/" or "@"
    report = page(
        tmp_path,
        cell("ar", name),
        cell("ssd", name),
        cell(name, name),
        methods={name: METHODS["sd"]},
        categories=("</style><script>alert(3)</script>", "-->"),
        command=["harness", HOSTILE],
        config={HOSTILE: HOSTILE},
        packages={HOSTILE: HOSTILE},
        pair={"name": HOSTILE},
        datasets={HOSTILE: {"source": HOSTILE, "sha256": HOSTILE}},
        failures=[{"item": HOSTILE, "error": HOSTILE, "message": HOSTILE}],
        skipped_requests=[{"request_id": HOSTILE, "dataset": HOSTILE, "reason": HOSTILE}],
    )
    assert report.is_inert
    assert HOSTILE in report.text
    assert "49" not in re.findall(r"alert\(2\)>.{0,12}", report.text)[0]
    assert report.headings[-1] == "To reproduce"


@pytest.mark.parametrize(
    ("methods", "absent"),
    [
        (("sd",), {"Speedup by dataset", "Latency and throughput"}),
        (("ar",), FIGURES - {"Where a round's time goes"}),
        (("sd", "ssd"), set()),
        (("ar", "ssd"), set()),
    ],
)
def test_missing_methods_leave_no_empty_figure(
    tmp_path: Path, methods: tuple[str, ...], absent: set[str]
) -> None:
    report = page(tmp_path, *map(cell, methods), prompts=3)
    assert set(report.headings) & FIGURES == FIGURES - absent
    assert not re.search(r"\b(nan|inf|None)\b", report.text, re.IGNORECASE)


def test_single_prompt_claims_no_interval(tmp_path: Path) -> None:
    report = page(tmp_path, cell("ar"), cell("sd"), prompts=1)
    assert "as fast as AR (one prompt, too few for an interval)" in report.text


def test_equal_methods_are_called_no_different(tmp_path: Path) -> None:
    report = page(tmp_path, cell("ar"), cell("copy"), methods={"copy": METHODS["ar"]})
    assert "COPY decodes with no measurable difference in speed from AR" in report.text


def test_decoder_without_spans_has_no_round_figures(tmp_path: Path) -> None:
    silent = Method(emitted=(3,), lookahead=4)
    run = write_run(tmp_path / "run", [cell("ar"), cell("x")], methods={"x": silent}, spans=False)
    report = Page(build([run], tmp_path / "report.html"))
    assert "Where a round's time goes" not in report.headings
    assert "A few rounds, as they happened" not in report.headings
    assert "Speedup by dataset" in report.headings


CONTENTION = {"verify_idle_ms": 100.0, "verify_loaded_ms": 125.0}


def with_diagnostics(**diagnostics: Any) -> dict[str, Any]:
    return {cell("ssd").id: {"devices": 2, "diagnostics": diagnostics}}


def test_prediction_and_contention_are_told(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run(), decoders=with_diagnostics(**CONTENTION))
    after = report.text.partition("Predicted against measured")[2]
    row = after.partition("ssd humaneval, temperature 0, batch size 1")[2].split()
    predicted, measured, efficiency = map(float, row[:3])
    assert efficiency == pytest.approx(measured / predicted, abs=0.02)
    told = "a verification takes 100.0 ms alone, 125.0 ms beside the working draft (+25%)"
    assert f"ssd, humaneval, temperature 0, batch size 1: {told}." in report.text


def test_without_a_cache_nothing_is_predicted(tmp_path: Path) -> None:
    assert "Predicted against measured" not in page(tmp_path, cell("ar"), cell("sd")).headings


def test_a_degraded_cell_is_marked_and_not_compared(tmp_path: Path) -> None:
    decoders = with_diagnostics(degraded="draft process 7: died", **CONTENTION)
    report = page(tmp_path, *full_run(), decoders=decoders)
    assert "ssd (degraded) unverified humaneval" in report.text
    assert "ssd/humaneval/t0/b1 is degraded" in report.text
    assert "draft process 7: died" in report.text
    assert "SD decodes" in report.text
    assert "SSD decodes" not in report.text
    assert "Predicted against measured" not in report.headings


def test_failed_and_skipped_work_is_listed(tmp_path: Path) -> None:
    report = page(
        tmp_path,
        cell("ar"),
        status="failed",
        failures=[
            {"item": "ssd/x/t0/b1/r0/k0", "error": "DraftProcessError", "message": "it died"}
        ],
        skipped_requests=[{"request_id": "x/3/r0", "dataset": "x", "reason": "too long"}],
    )
    assert "What did not run" in report.headings
    assert "DraftProcessError" in report.text
    assert "too long" in report.text
    assert "status: failed" in report.text


def test_run_without_any_finished_request_is_readable(tmp_path: Path) -> None:
    report = page(tmp_path, status="interrupted")
    assert "no request was finished" in report.text
    assert "svg" not in report.elements


def test_unlike_machines_are_warned_about(tmp_path: Path) -> None:
    here = write_run(tmp_path / "here", [cell("ar")])
    there = write_run(tmp_path / "there", [cell("ar")], fingerprint={"cpu": {"model": "Other CPU"}})
    report = Page(build([here, there], tmp_path / "report.html"))
    assert "runs 1 and 2 are from unlike machines" in report.text
    assert "2 benchmark runs" in report.text


def repeated(folder: Path, *verify_ms: int) -> list[Path]:
    """Runs of one plan whose SD verifies in that time; AR in 100 ms."""
    methods = {ms: {"sd": Method((4,), verify_ms=ms, lookahead=4)} for ms in verify_ms}
    cells = [cell("ar"), cell("sd")]
    return [write_run(folder / f"r{ms}", cells, methods=own) for ms, own in methods.items()]


def test_runs_of_one_plan_are_taken_together(tmp_path: Path) -> None:
    # 4 tokens in a step of 100, 125 and 160 ms, 1 ms and up to 4% on top, against 1 in 100:
    # 4, 3.2 and 2.5, whose geometric mean is 32 to the power 1/3, 3.17
    runs = repeated(tmp_path, 100, 125, 160)
    report = Page(build(runs, tmp_path / "report.html"))
    assert report.headings[0] == "All runs together"
    found = re.search(
        r"sd over ar .*?placement (\S+) (\S+) (\S+) (\S+)x \[(\S+), (\S+)\]", report.text
    )
    assert found is not None
    *values, low, high = map(float, found.groups())
    assert values == pytest.approx([4, 3.2, 2.5, 3.17], rel=0.02)
    # the runs' logarithms are 0.22 to 0.25 apart: sd 0.235, times 4.30 / sqrt(3) is 0.58
    assert (low, high) == pytest.approx((3.17 / 1.79, 3.17 * 1.79), rel=0.04)
    assert "3 runs, in this order: run 1, run 2, run 3." in report.text
    assert report.is_inert


def test_two_runs_together_have_no_interval_and_unlike_runs_no_figures(tmp_path: Path) -> None:
    first, second = repeated(tmp_path, 100, 125)
    report = Page(build([first, second], tmp_path / "report.html"))
    assert "2 runs do not say how much runs differ" in report.text
    assert "[no interval]" in report.text
    alone = write_run(tmp_path / "alone", [cell("ar")])
    unlike = Page(build([first, alone], tmp_path / "unlike.html"))
    assert "All runs together" not in unlike.headings
    reason = "run 1 and run 2 are not runs of one plan on one machine: only in run 1: sd/humaneval"
    assert f"no speedups of all runs together: {reason}" in unlike.text


def test_an_emulated_run_says_so_at_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", full_run())
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["fingerprint"]["emulated"] = "emulated:h100x4+1-llama"
    (run / "manifest.json").write_text(json.dumps(manifest))
    report = Page(build([run], tmp_path / "report.html"))
    assert "EMULATED h100x4+1-llama" in report.text
    assert "no measurement of that hardware" in report.text
    print_run(run)
    assert "EMULATED h100x4+1-llama" in capsys.readouterr().out


def test_the_certificate_stands_beside_the_methods_name(tmp_path: Path) -> None:
    group = {"temperature": 0.0, "batch_size": 1, "tokens": 9, "reason": "", "content": {}}
    group["content"] = {"after_eos": 0}
    verdicts = [
        {**group, "method": "sd", "status": "pass"},
        {**group, "method": "ssd", "status": "fail"},
    ]
    report = page(tmp_path, *full_run(), certificate={"verdicts": verdicts})
    for told in ("sd lossless humaneval", "ssd NOT lossless humaneval", "ar unverified humaneval"):
        assert told in report.text


def saved(report: Page, name: str) -> bytes:
    """What a browser saves under a name."""
    links = dict(zip(report.values("download"), downloads_of(report), strict=True))
    return base64.b64decode(links[f"run-1-{name}"].partition(";base64,")[2])


def downloads_of(report: Page) -> list[str]:
    return [link for link in report.values("href") if link.startswith("data:")]


def test_the_data_can_be_saved_from_the_page(tmp_path: Path) -> None:
    report = page(tmp_path, *full_run())
    for name in ("requests", "rounds"):
        stored = pd.read_parquet(tmp_path / "run" / f"{name}.parquet")
        pd.testing.assert_frame_equal(
            pd.read_parquet(io.BytesIO(saved(report, f"{name}.parquet"))), stored
        )
    cells = pd.read_csv(io.BytesIO(saved(report, "cells.csv"))).set_index(["method", "control"])
    assert len(cells) == 4
    # Prompts of 14, 15, 14 and 14 rounds (4, 3, 2, 5 tokens in turn); 160 ms, up to 4% more, and 1.
    speed = 4 * 48 / (57 * (0.160 * 1.02 + 0.001))
    assert cells.loc[("sd", False), "tokens_per_s"] == pytest.approx(speed, rel=0.01)
    assert cells.loc[("ssd", False), "speedup_sd_low"] > 1


def test_text_in_the_csv_is_never_a_formula(tmp_path: Path) -> None:
    name = "=HYPERLINK(1)"
    report = page(tmp_path, cell("ar", name), cell(name, name), methods={name: METHODS["sd"]})
    cells = pd.read_csv(io.BytesIO(saved(report, "cells.csv")))
    assert set(cells["dataset"]) == {f"'{name}"}
    assert f"'{name}" in set(cells["method"])


def test_data_without_room_are_named_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.page.ROOM", 9_000)
    report = page(tmp_path, *full_run())
    assert report.values("download") == ["run-1-cells.csv"]
    assert "a row for each round" in report.text
    assert "is too large for this page and in the run directory" in report.text


def test_torch_is_not_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", full_run(), prompts=2)
    program = (
        "import sys; from pathlib import Path; from reports.page import build;"
        "build([Path(sys.argv[1])], Path(sys.argv[2]));"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(run), str(tmp_path / "report.html")]
    done = subprocess.run(command, check=False)
    assert done.returncode == 0
