"""The paper's figures from run directories that the real store wrote."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from made_up_runs import HOSTILE, METHODS, Page, cell, write_run

from harness.errors import UsageError
from harness.store import read_run
from reports.paper.charts import Line, Mark, Panel, draw_panels
from reports.paper.evidence import gather, varied
from reports.paper.files import Written, write_paper
from reports.paper.miss_rate import LARGEST, fit_exponent, miss_rates
from reports.paper.residual import residual_mass
from reports.svg import inline_svg, style

SSD = METHODS["ssd"]
VARIANTS: dict[str, dict[str, Any]] = {
    "ssd": {"fan_out": "uniform", "saguaro_c": 1.0, "fallback": "fast"},
    "ssd:geometric": {"fan_out": "geometric", "saguaro_c": 1.0, "fallback": "fast"},
    "ssd:c0": {"fan_out": "uniform", "saguaro_c": 0.0, "fallback": "fast"},
    "ssd:neural": {"fan_out": "uniform", "saguaro_c": 1.0, "fallback": "neural"},
}


def whole_run(directory: Path, **manifest: Any) -> Path:
    """Every variant at two temperatures and two batch sizes."""
    methods = {name: replace(SSD, wait_ms=8 + 5 * at) for at, name in enumerate(VARIANTS)}
    cells = [
        cell(method, temperature=temperature, batch_size=batch)
        for method in ("ar", "sd", *VARIANTS)
        for temperature in (0.0, 1.0)
        for batch in (1, 4)
    ]
    decoders = {
        each.id: {
            "devices": 2,
            "options": VARIANTS.get(each.method, {}),
            "diagnostics": {"critical_batch_size": 2.0} if each.method in VARIANTS else {},
        }
        for each in cells
    }
    return write_run(directory, cells, methods=methods, decoders=decoders, **manifest)


def rounds_of(ranks: list[int | None], cache: list[str | None]) -> pd.DataFrame:
    table = {"cache": cache, "rank": [float("nan") if r is None else float(r) for r in ranks]}
    count = len(ranks)
    return pd.DataFrame(
        {**table, "sequence": ["a"] * count, "round": range(count), "temperature": [0.0] * count}
    )


def test_miss_rate_is_the_share_of_ranks_beyond() -> None:
    # Rounds 1.. tell the outcome before them; 20 after a backup's draft, then 20 after a hit.
    ranks = [None, *[1, 1, 2, 5] * 5, *[1, 1, 1, 9] * 5]
    cache = [None, *["miss"] * 19, *["hit"] * 21]
    found = miss_rates(rounds_of(ranks, cache)).set_index(["after", "fan_out"])["miss_rate"]
    assert found["miss", 1] == pytest.approx(10 / 20)
    assert found["miss", 2] == pytest.approx(5 / 20)
    assert found["miss", 5] == 0
    assert found["hit", 1] == pytest.approx(5 / 20)
    assert found["hit", 8] == pytest.approx(5 / 20)
    assert found["hit", 9] == 0


def test_residual_mass_by_hand() -> None:
    # One sequence; of round n's draft, `accepted` of 4; round n + 1 tells the rank of its token.
    rows = 41
    table = pd.DataFrame(
        {
            "item": "i",
            "request_id": "a",
            "round": range(rows),
            "accepted": [2, 4] * 20 + [2],  # every other round ends in a rejection
            "drafted": 4,
            "backup": [None] * 32 + ["fast"] * 9,
            "rank": [float("nan"), *[1.0, 99.0, 3.0, 99.0] * 10],  # behind rejections: 1, 3, 1, 3
        }
    )
    assert residual_mass(table.iloc[:30]).empty  # 15 rejections
    found = residual_mass(pd.concat([table, table.assign(request_id="b")])).set_index("fan_out")
    assert found["rejections"].unique() == 2 * 16  # those of the fast backup are left out
    assert found["mass"].loc[[1, 2, 3, 16]].tolist() == [0.5, 0.5, 1.0, 1.0]


def test_log_axes_have_plain_numbers() -> None:
    marks = tuple(Mark(2.0**n, 0.5**n) for n in range(5))
    with style():
        svg = inline_svg(
            draw_panels([Panel("F", "miss", (Line("a", marks),), log=True)]), "k", "", ""
        )
    assert "mathdefault" not in svg
    assert all(f">{tick}<" in svg for tick in ("1", "0.5", "0.1", "16"))


def test_unknown_ranks_and_few_outcomes_make_no_curve() -> None:
    few = rounds_of([None, *[1] * 19, *[None] * 30], [None, *["hit"] * 49])
    assert miss_rates(few).empty


@pytest.mark.parametrize("exponent", [0.7, 1.2, 2.5])
def test_the_exponent_that_drew_the_ranks_is_found(exponent: float) -> None:
    uniform = np.random.default_rng(5).random(20_000)
    ranks = np.floor(uniform ** (-1 / exponent))  # P(rank > F) = P(u^(-1/r) >= 1 + F) = (1+F)^-r
    assert (ranks > LARGEST).any()
    assert fit_exponent(ranks) == pytest.approx(exponent, rel=0.03)


def test_variants_are_grouped_by_the_one_option_that_differs(tmp_path: Path) -> None:
    evidence = gather([read_run(whole_run(tmp_path / "run"))])
    (fan_outs,) = varied(evidence.cells, "fan_out")
    assert {value: len(cells) for value, cells in fan_outs.items()} == {
        "uniform": 4,
        "geometric": 4,
    }
    (fallbacks,) = varied(evidence.cells, "fallback")
    assert {c.figures.method for c in fallbacks["neural"]} == {"ssd:neural"}
    assert list(varied(evidence.cells, "lookahead")) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Whole figures of a pair with a hostile name."""
    folder = tmp_path_factory.mktemp("paper")
    told = {"pair": {"name": HOSTILE}, "command": ["harness", HOSTILE]}
    return write_paper([whole_run(folder / "run", **told)], folder / "out")


def test_every_figure_has_its_three_files(written: Written) -> None:
    out = written.index.parent
    keys = [figure.key for figure in written.figures]
    figures = ["miss-rate", "fan-out", "saguaro-c", "saguaro-residual", "fallback", "speed"]
    assert keys == [*figures, "pareto-1", "pareto-2"]  # at two temperatures
    assert written.left_out == ()
    for key in keys:
        ElementTree.parse(out / f"{key}.svg")
        assert (out / f"{key}.png").read_bytes()[:4] == b"\x89PNG"
        assert len(pd.read_csv(out / f"{key}.csv")) > 1
    page = Page(written.index)
    assert page.elements.count("svg") == len(keys)
    assert len(page.values("id")) == len(set(page.values("id")))
    assert page.is_inert


def test_the_critical_batch_size_is_drawn(written: Written) -> None:
    (fallback,) = (figure for figure in written.figures if figure.key == "fallback")
    assert set(fallback.table["critical_batch_size"]) == {2.0}
    with style():
        panels = fallback.draw().axes
    assert len(panels) == 2  # a temperature each
    for axes in panels:
        assert [2.0, 2.0] in [list(line.get_xdata()) for line in axes.lines]


def test_miss_rates_fall_with_the_fan_out_beside_their_fit(written: Written) -> None:
    table = pd.read_csv(written.index.parent / "miss-rate.csv")
    curves = table.groupby(["temperature", "after"])
    assert len(curves) == 4  # two temperatures, after hits and after misses
    # Rounds 4, 8, ... miss; ranks from there are 1, 2, 1, 5: behind a miss 2, else 1, 1 and 5.
    last_missed = {"miss": 1, "hit": 4}
    for (_, after), curve in curves:
        assert curve["miss_rate"].is_monotonic_decreasing
        rates = curve.set_index("fan_out")["miss_rate"]
        assert rates[last_missed[after]] == pytest.approx(1 if after == "miss" else 1 / 3, abs=0.05)
        assert rates[last_missed[after] + 1] == 0
        law = (1 + curve["fan_out"]) ** -curve["exponent"]
        assert curve["fitted"].to_numpy() == pytest.approx(law.to_numpy())


def test_a_fitted_curve_has_ticks_as_far_as_it_goes(written: Written) -> None:
    (rates,) = (figure for figure in written.figures if figure.key == "miss-rate")
    with style():
        (axes,) = rates.draw().axes  # no rank is beyond 5; the law is drawn up to 64
    told = [label.get_text() for label in axes.get_xticklabels()]
    assert told == ["1", "2", "4", "8", "16", "32", "64"]


def test_published_speeds_stand_apart(written: Written) -> None:
    table = pd.read_csv(written.index.parent / "speed.csv")
    published = table[table["source"] == "published, on other hardware"]
    ratio = published.set_index(["dataset", "method"])["over_ar"]
    assert ratio["llama-3.1-70b", "ssd"] == pytest.approx(255.8 / 54.7)
    assert ratio["qwen3-32b", "sd"] == pytest.approx(136.8 / 88.8)
    assert set(table[table["source"] == "measured"]["dataset"]) == {"humaneval"}


def test_a_run_of_one_cell_draws_nothing_and_says_so(tmp_path: Path) -> None:
    written = write_paper([write_run(tmp_path / "run", [cell("ar")])], tmp_path / "out")
    assert written.figures == ()
    assert len(written.left_out) == 7
    told = Page(written.index).text
    assert "Left out" in told
    assert "miss-rate: needs rounds of ssd with the draft's rank" in told


def test_png_has_the_pages_colours(written: Written) -> None:
    from matplotlib.image import imread

    image = imread(written.index.parent / "fan-out.png")
    pixels = np.round(image[::4, ::4, :3] * 255).astype(int)
    seen = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3), axis=0)}
    assert (255, 255, 255) in seen
    assert not {colour for colour in seen if colour[:2] == (10, 0)}  # of `reports.colours.drawn`


def test_unlike_machines_are_refused(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [cell("ar")]),
        write_run(tmp_path / "b", [cell("ar")], fingerprint={"cpu": {"model": "Other CPU"}}),
    ]
    with pytest.raises(UsageError, match="runs 1 and 2 differ"):
        write_paper(runs, tmp_path / "out")


def test_runs_of_one_machine_at_another_load_go_together(tmp_path: Path) -> None:
    loads = [
        {"cpu": {"model": "CPU", "frequency_mhz": 2000 + i}, "load_average": i} for i in (0, 1)
    ]
    runs = [
        read_run(write_run(tmp_path / method, [cell(method)], fingerprint=load))
        for method, load in zip(("ar", "sd"), loads, strict=True)
    ]
    assert [each.figures.method for each in gather(runs).cells] == ["ar", "sd"]


def test_hostile_names_are_inert(written: Written) -> None:
    page = Page(written.index)
    assert page.is_inert
    assert HOSTILE in page.text


def test_torch_is_not_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [cell("ar"), cell("sd")], prompts=2)
    program = (
        "import sys; from pathlib import Path; from reports.paper.files import write_paper;"
        "write_paper([Path(sys.argv[1])], Path(sys.argv[2])); sys.exit('torch' in sys.modules)"
    )
    arguments = [str(run), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=False)
    assert done.returncode == 0
