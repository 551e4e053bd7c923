"""The dashboard over run directories that the real store wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_up_runs import HOSTILE, METHODS, Method, Page, cell, write_run

from harness.errors import StoreError
from harness.metrics import cell_metrics, split_cells
from harness.speedup import speedup
from harness.store import read_run
from reports.dashboard.site import build_site

CELLS = [cell("ar"), cell("ar", control=True), cell("sd"), cell("ssd")]


def day(number: int) -> dict[str, Any]:
    revision = f"{number:040x}"
    created = f"2026-03-{number + 1:02}T08:00:00+00:00"
    return {"created": created, "git": {"revision": revision, "dirty": False}}


def feed(site: Path) -> dict[str, Any]:
    return dict(json.loads((site / "feed.json").read_text(encoding="utf-8")))


def test_one_run_with_one_cell(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "only", [cell("ar")], prompts=1)
    site = build_site(run, tmp_path / "site")
    assert len(site.records) == 1
    page = Page(site.index)
    assert "1 run" in page.text
    assert "No series is at a worse level than before." in page.text
    group = Page(next((tmp_path / "site" / "groups").iterdir()))
    assert "No series changed its level" in group.text
    assert "svg" not in group.elements  # one point is no series
    assert not re.search(r"\b(nan|inf|None)\b", group.text)


def test_figures_are_those_of_the_harness(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", CELLS, prompts=9)
    build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    series = feed(tmp_path / "site")["groups"][0]["series"]
    found = {(each["line"], each["metric"]): each["points"][0] for each in series}
    stored = read_run(run)
    cells = {data.cell.label: data for data in split_cells(stored.requests, stored.rounds)}
    for method in ("ar", "sd", "ssd"):
        expected = cell_metrics(cells[method], 1)
        assert found[method, "tokens_per_s"]["value"] == pytest.approx(expected.tokens_per_s)
        assert found[method, "tpot_ms"]["value"] == pytest.approx(expected.tpot_ms.p50)
    expected = cell_metrics(cells["ssd"], 2)
    assert found["ssd", "hit_rate"]["value"] == pytest.approx(expected.hit_rate)
    assert found["ssd", "acceptance_length"]["value"] == pytest.approx(expected.acceptance_length)
    over = speedup(cells["ssd"], cells["sd"])
    assert found["ssd", "over_sd"]["value"] == pytest.approx(over.value)
    assert ("ar", "over_ar") not in found


def slower_from(number: int) -> list[dict[str, Method]]:
    """Ten runs; from one on, SSD's verification takes 30% longer."""
    slow = Method(
        emitted=(5, 4, 2, 4), verify_ms=143, wait_ms=8, speculate_ms=95, lookahead=4, devices=2
    )
    return [{"ssd": METHODS["ssd"] if at < number else slow} for at in range(10)]


def test_a_regression_is_told_with_its_commits(tmp_path: Path) -> None:
    for at, methods in enumerate(slower_from(6)):
        write_run(tmp_path / "runs" / f"r{at}", CELLS, methods=methods, **day(at))
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    slow = [c for c in site.open_regressions if c.series.name == "tokens_per_s"]
    assert [change.series.line for change in slow] == ["ssd"]
    told = next(c for c in feed(tmp_path / "site")["groups"][0]["changes"] if c["open"])
    assert told["commits"] == [f"{5:040x}", f"{6:040x}"]
    assert {change.series.line for change in site.open_regressions} == {"ssd"}
    page = Page(site.index)
    assert "are at a worse level than before" in page.text
    assert "regressions" in (tmp_path / "site" / "badge.svg").read_text(encoding="utf-8")
    group = Page(next((tmp_path / "site" / "groups").iterdir()))
    assert group.elements.count("svg") == 6
    assert len(group.values("id")) == len(set(group.values("id")))


def test_a_recovered_regression_is_not_open(tmp_path: Path) -> None:
    for at, methods in enumerate(slower_from(6)):
        methods = methods if at < 8 else {}
        write_run(tmp_path / "runs" / f"r{at}", CELLS, methods=methods, **day(at))
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    assert site.open_regressions == []
    changes = [c for c in site.groups[0].changes if c.series.name == "tokens_per_s"]
    assert [change.regression for change in changes] == [False, True]
    assert "no regression" in (tmp_path / "site" / "badge.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": {"cpu": {"model": "Other CPU"}}},
        {"pair": {"name": "other", "target": {"sha256": "d" * 64}}},
        {"pair": {"name": "qwen2.5-coder", "target": {"sha256": "d" * 64}}},
    ],
)
def test_unlike_machines_and_weights_are_never_in_one_group(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    write_run(tmp_path / "runs" / "a", CELLS)
    write_run(tmp_path / "runs" / "b", CELLS, **other)
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    assert [len(view.records) for view in site.groups] == [1, 1]


def test_other_prompts_make_another_series(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", CELLS, prompts=4)
    write_run(tmp_path / "runs" / "b", CELLS, prompts=5)
    write_run(tmp_path / "runs" / "c", CELLS, prompts=4, config={"max_new_tokens": 99})
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    assert len(site.groups) == 1
    assert len(site.groups[0].settings) == 3


def test_degraded_running_and_incomplete_cells_are_listed_but_not_followed(tmp_path: Path) -> None:
    decoders = {cell("ssd").id: {"devices": 2, "diagnostics": {"degraded": "died"}}}
    write_run(tmp_path / "runs" / "degraded", CELLS, decoders=decoders)
    write_run(tmp_path / "runs" / "running", CELLS, status="running")
    plan = [f"{cell('sd').id}/r0/k0", f"{cell('sd').id}/r0/k1"]
    write_run(tmp_path / "runs" / "half", CELLS, plan=plan, status="failed")
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    lines = {r.source: {seen.line for seen in r.observations} for r in site.records}
    assert lines == {"degraded": {"ar", "sd"}, "running": set(), "half": {"ar", "ssd"}}


def test_a_damaged_run_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "good", [cell("ar")])
    bad = write_run(tmp_path / "runs" / "bad", [cell("ar")])
    (bad / "rounds.parquet").write_bytes(b"not parquet")
    newer = write_run(tmp_path / "runs" / "newer", [cell("ar")])
    manifest = json.loads((newer / "manifest.json").read_text(encoding="utf-8"))
    (newer / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}), encoding="utf-8")
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    assert [record.source for record in site.records] == ["good"]
    assert {each.source for each in site.unreadable} == {"bad", "newer"}
    assert "has schema 99" in Page(site.index).text


def test_no_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no folder of run directories"):
        build_site(tmp_path / "absent", tmp_path / "site")


def test_a_folder_without_runs_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    site = build_site(tmp_path / "runs", tmp_path / "site")
    assert "There is no run to show yet." in Page(site.index).text


def test_reports_are_written_newest_first_and_kept(tmp_path: Path) -> None:
    for at in range(3):
        write_run(tmp_path / "runs" / f"r{at}", [cell("ar")], **day(at))
    folder = tmp_path / "site" / "runs"
    build_site(tmp_path / "runs", tmp_path / "site", reports=1)
    (first,) = folder.glob("*.report.html")
    assert first.name.startswith("r2-")
    stamp = first.stat().st_mtime_ns
    build_site(tmp_path / "runs", tmp_path / "site", reports=5)
    assert len(list(folder.glob("*.report.html"))) == 3
    assert first.stat().st_mtime_ns == stamp
    run_page = Page(next(folder.glob("r0-*[!t].html")))
    assert "The full report of this run" in run_page.text


def test_every_link_leads_to_a_page_of_the_site(tmp_path: Path) -> None:
    for at, methods in enumerate(slower_from(5)):
        write_run(tmp_path / "runs" / f"r{at}", CELLS, methods=methods, **day(at))
    build_site(tmp_path / "runs", tmp_path / "site", reports=1)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) == 1 + 1 + 10 + 1
    for path in pages:
        page = Page(path)
        assert page.is_inert
        for link in page.values("href", "src", "xlink:href"):
            if link.startswith("data:"):
                continue
            target, _, anchor = link.partition("#")
            where = (path.parent / target).resolve() if target else path
            assert where.exists(), f"{path}: {link}"
            assert not anchor or anchor in Page(where).values("id")


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'{{7*7}}$x$"
    hostile = {
        "pair": {"name": HOSTILE},
        "fingerprint": {"cpu": {"model": HOSTILE}},
        "datasets": {HOSTILE: {"sha256": HOSTILE}},
        "git": {"revision": HOSTILE, "dirty": True},
    }
    folder = tmp_path / "runs" / "<script>alert(1)<" / 'script>"&'
    for at in range(2):
        methods = {name: METHODS["sd"]}
        cells = [cell("ar", name), cell(name, name)]
        write_run(folder / str(at), cells, methods=methods, created=HOSTILE, **hostile)
    bad = tmp_path / "runs" / HOSTILE.replace("/", "") / "manifest.json"
    bad.parent.mkdir()
    bad.write_text(HOSTILE, encoding="utf-8")
    build_site(tmp_path / "runs", tmp_path / "site")
    pages = [Page(path) for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) == 6
    for page in pages:
        assert page.is_inert
    assert any(HOSTILE in page.text for page in pages)
    ElementTree.parse(tmp_path / "site" / "badge.svg")
    told = feed(tmp_path / "site")
    assert {group["pair"] for group in told["groups"]} == {HOSTILE}
    assert {series["line"] for group in told["groups"] for series in group["series"]} == {
        "ar",
        name,
    }
    assert all(re.fullmatch(r"runs/[a-z0-9-]+\.html", run["page"]) for run in told["runs"])


def benchmark_file(path: Path, number: int, seconds: float, **machine: Any) -> None:
    cpu = {"brand_raw": "AMD EPYC 9R14", "count": 2, "hz_actual_friendly": f"{number} GHz"}
    stats = {"rounds": 16, "median": seconds, "iqr": seconds / 100}
    contents = {
        "machine_info": {"node": "host", "python_version": "3.11.9", "cpu": cpu, **machine},
        "commit_info": {"id": f"{number:040x}", "dirty": False},
        "benchmarks": [{"fullname": "tests/bench/test_x.py::test_pass", "stats": stats}],
        "datetime": f"2026-03-{number + 1:02}T08:00:00.123456+00:00",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents), encoding="utf-8")


def test_pytest_benchmark_files_are_series_too(tmp_path: Path) -> None:
    for at in range(8):
        benchmark_file(tmp_path / "runs" / f"{at}.json", at, 0.010 if at < 5 else 0.013)
    (tmp_path / "runs" / "other.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "runs" / "broken.json").write_text("{", encoding="utf-8")
    site = build_site(tmp_path / "runs", tmp_path / "site")
    assert len(site.records) == 8
    (change,) = site.open_regressions
    assert change.series.setting == "tests/bench/test_x.py::test_pass"
    assert (change.before.created[:10], change.after.created[:10]) == ("2026-03-05", "2026-03-06")
    assert change.step.change == pytest.approx(0.3)
    point = change.series.points[0].estimate
    assert (point.low, point.high) == pytest.approx((10 - 1.57 * 0.1 / 4, 10 + 1.57 * 0.1 / 4))
    assert [each.source for each in site.unreadable] == ["broken.json"]


def test_benchmarks_of_unlike_machines_are_apart(tmp_path: Path) -> None:
    benchmark_file(tmp_path / "runs" / "a.json", 0, 0.01)
    benchmark_file(tmp_path / "runs" / "b.json", 1, 0.01, python_version="3.13.0")
    assert len(build_site(tmp_path / "runs", tmp_path / "site").groups) == 2


def test_what_was_read_is_not_read_again_until_it_changes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", CELLS)
    first = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    for table in run.glob("*.parquet"):
        state = table.stat()
        table.write_bytes(b"\0" * state.st_size)
        os_times(table, state.st_mtime_ns)
    again = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    assert again.records == first.records
    (run / "rounds.parquet").touch()
    assert build_site(tmp_path / "runs", tmp_path / "site", reports=0).records == ()


def os_times(path: Path, stamp: int) -> None:
    import os

    os.utime(path, ns=(stamp, stamp))


def test_the_site_inside_the_folder_is_not_taken_for_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [cell("ar")])
    for _ in range(2):
        site = build_site(tmp_path, tmp_path / "site")
        assert [record.source for record in site.records] == ["a"]
        assert site.unreadable == ()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", CELLS, prompts=2)
    program = (
        "import sys; from pathlib import Path; from reports.dashboard.site import build_site;"
        "build_site(Path(sys.argv[1]), Path(sys.argv[2]), 1);"
        "sys.exit('torch' in sys.modules)"
    )
    arguments = [str(tmp_path / "runs"), str(tmp_path / "site")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_thousand_runs_take_less_than_a_minute(tmp_path: Path) -> None:
    import shutil

    first = write_run(tmp_path / "first", CELLS, prompts=12)
    manifest = json.loads((first / "manifest.json").read_text(encoding="utf-8"))
    for number in range(1000):
        folder = tmp_path / "runs" / f"{number // 100}" / f"r{number}"
        shutil.copytree(first, folder)
        created = f"20{10 + number // 300:02}-{1 + number // 28 % 12:02}-{1 + number % 28:02}"
        told = {**manifest, **day(number % 28), "created": f"{created}T08:00:00+00:00"}
        (folder / "manifest.json").write_text(json.dumps(told), encoding="utf-8")
    began = time.perf_counter()
    site = build_site(tmp_path / "runs", tmp_path / "site")
    assert len(site.records) == 1000
    assert time.perf_counter() - began < 60
