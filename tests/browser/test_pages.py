"""Every kind of page in headless Chromium, wide and narrow, light and dark: `make browser-test`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import HOSTILE, METHODS, cell, write_run
from test_paper_figures import whole_run
from test_report_kinds import grid_run

from reports.dashboard.site import build_site
from reports.page import build
from reports.paper.files import write_paper

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CELLS = [cell("ar"), cell("ar", control=True), cell("sd"), cell("ssd")]
NAME = "<img src=x onerror=alert(1)>\"'{{7*7}}$x$"  # ids hold no "/" or "@"
EVERYWHERE: dict[str, Any] = {
    "command": ["harness", HOSTILE],
    "config": {HOSTILE: HOSTILE},
    "pair": {"name": HOSTILE},
    "fingerprint": {"cpu": {"model": HOSTILE}},
    "git": {"revision": HOSTILE, "dirty": True},
    "datasets": {HOSTILE: {"source": HOSTILE, "sha256": HOSTILE}},
    "failures": [{"item": HOSTILE, "error": HOSTILE, "message": HOSTILE}],
    "skipped_requests": [{"request_id": HOSTILE, "dataset": HOSTILE, "reason": HOSTILE}],
}


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None or shutil.which("node") is None:
        pytest.skip("needs Chromium and Node.js")
    if not (HERE / "node_modules").exists():
        pytest.skip("needs axe-core and puppeteer-core: `make browser-test` installs them")
    return found


def look(browser: str, *pages: Path) -> list[dict[str, Any]]:
    """What `check.mjs` found in each view; keeps screenshots where $SCREENSHOTS says."""
    screenshots = os.environ.get("SCREENSHOTS", "-")
    command = ["node", str(HERE / "check.mjs"), browser, screenshots, *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def hostile_run(directory: Path) -> Path:
    methods, cells = {NAME: METHODS["sd"]}, [cell("ar", NAME), cell("ssd", NAME), cell(NAME, NAME)]
    return write_run(directory, cells, methods=methods, categories=(NAME, "-->"), **EVERYWHERE)


def report_pages(folder: Path) -> list[Path]:
    failure = {
        "item": "ssd/x/t0/b1/r0/k0",
        "error": "DraftProcessError",
        "message": "it died " * 30,
    }
    grid = [
        cell(method, dataset, batch_size=batch)
        for dataset in ("humaneval", "gsm8k")
        for batch in (1, 4)
        for method in METHODS
    ]
    runs = [
        write_run(folder / "full", [*CELLS, *grid[3:]], prompts=12, categories=("code", "chat")),
        write_run(folder / "single", [cell("ar")], prompts=1),
        write_run(folder / "empty", [], status="interrupted"),
        write_run(folder / "failed", CELLS[:2], status="failed", failures=[failure] * 8),
        hostile_run(folder / "hostile"),
    ]
    repeated = [
        write_run(
            folder / f"repeated-{at}",
            [cell("ar", NAME), cell(NAME, NAME)],
            methods={NAME: replace(METHODS["sd"], verify_ms=100 + at)},
            **EVERYWHERE,
        )
        for at in range(3)
    ]
    return [
        *(build([run], folder / f"{run.name}.html") for run in runs),
        build(repeated, folder / "repeated.html"),
    ]


def large_pages(folder: Path) -> list[Path]:
    return [build([grid_run(folder / "grid")], folder / "grid.html")]


def dashboard_pages(folder: Path) -> list[Path]:
    for at in range(3):
        created = f"2026-03-0{at + 1}T08:00:00+00:00"
        write_run(folder / "runs" / f"r{at}", CELLS, prompts=6, created=created)
    hostile_run(folder / "runs" / '<script>alert(1)<"&')
    site = build_site(folder / "runs", folder / "site", reports=0)
    groups = sorted((folder / "site" / "groups").glob("*.html"))
    runs = sorted((folder / "site" / "runs").glob("*.html"))
    assert (len(groups), len(runs)) == (2, 4)
    return [site.index, *groups, runs[0], runs[-1]]


def paper_pages(folder: Path) -> list[Path]:
    told = {"pair": {"name": HOSTILE}, "command": ["harness", HOSTILE]}
    return [write_paper([whole_run(folder / "variants", **told)], folder / "paper").index]


@pytest.mark.parametrize("make", [report_pages, large_pages, dashboard_pages, paper_pages])
def test_a_reader_stumbles_on_nothing(browser: str, make: Any, tmp_path: Path) -> None:
    pages = make(tmp_path)
    views = look(browser, *pages)
    assert len(views) == 4 * len(pages)
    for found in ("errors", "requests", "faults", "overflowing"):
        assert {view["page"]: view[found] for view in views if view[found]} == {}, found


def test_tables_are_sorted_from_the_keyboard(browser: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CELLS, prompts=3)
    before, rising, falling, again = look(browser, build([run], tmp_path / "page.html"))[0][
        "sorted"
    ]
    numbers = [float(entry) for entry in before["entries"]]
    assert len(set(numbers)) >= 3
    assert (before["order"], again["order"]) == (None, None)
    assert again["entries"] == before["entries"]
    assert rising["order"] == "ascending"
    assert [float(entry) for entry in rising["entries"]] == sorted(numbers)
    assert falling["order"] == "descending"
    assert [float(entry) for entry in falling["entries"]] == sorted(numbers, reverse=True)


def test_what_a_reader_would_stumble_on_is_found(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><html lang="en"><title>t</title><body style="background: #fff">'
        '<p style="color: #ccc">pale</p><img src="http://example.invalid/x.png" alt="">'
        '<div style="width: 3000px">wide</div><script>throw new Error("broken")</script>'
    )
    view = look(browser, page)[0]
    assert any("broken" in error for error in view["errors"])
    assert view["requests"] == ["http://example.invalid/x.png"]
    assert any(fault.startswith("color-contrast") for fault in view["faults"])
    assert "DIV wide" in view["overflowing"]
