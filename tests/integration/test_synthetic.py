"""A run with synthetic acceptance: no figure of it shows anywhere without saying so."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from made_up_runs import MANIFEST, METHODS, Page, cell, write_run

from harness.cli import cli
from harness.comparison import compare_runs
from harness.comparison_formats import FORMATS
from harness.config import load
from harness.errors import UsageError
from harness.labels import label
from harness.store import read_manifest, read_run
from harness.tuning.search import tune
from reports.dashboard.site import build_site
from reports.page import build
from reports.paper.files import write_paper

SYNTHETIC = "acceptance 0.7, random weights"
LABEL = f"SYNTHETIC {SYNTHETIC}"
OPTIONS = (
    *("--pair", "tiny", "--datasets", "mini", "--prompts", "2", "--max-new-tokens", "12"),
    *("--max-context", "512", "--acceptance", "synthetic:0.7", "--weights", "random"),
)


def harness(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "synthetic"
    done = harness("run", "--no-isolate", "--methods", "ar,sd", *OPTIONS, "--out", out)
    assert done.exit_code == 0, done.output
    assert LABEL in done.output
    return out


def made_up(directory: Path, **fingerprint: Any) -> Path:
    """A stored run of all methods, which need not be decoded."""
    cells = [cell(name) for name in METHODS] + [cell("ar", control=True)]
    return write_run(directory, cells, fingerprint=MANIFEST["fingerprint"] | fingerprint)


def test_the_manifest_says_what_was_made_up(run: Path) -> None:
    manifest = read_manifest(run)
    assert label(manifest) == LABEL
    assert manifest["pair"]["target"]["source"].startswith("random weights of the shape of")
    assert manifest["config"]["verify"] is manifest["config"]["tuned"] is False
    assert manifest["stop_token_ids"] == []  # made-up texts are as long as they may be
    assert "greedy" not in manifest
    assert "certificate" not in manifest


def test_tables_and_json_say_so(run: Path) -> None:
    shown = harness("show", run).output
    assert f"equal-target placement, {LABEL}" in shown
    assert "warning: SYNTHETIC, no measurement of these models" in shown
    assert "losslessness: not checked: the acceptance is synthetic" in shown
    assert "greedy_equality" not in shown
    told = json.loads(harness("show", run, "--json").output)
    assert {each["synthetic"] for each in told["cells"]} == {SYNTHETIC}
    assert {each["verified"] for each in told["cells"]} == {None}


def test_the_outputs_are_of_full_length_and_alike(run: Path) -> None:
    requests = read_run(run).requests
    assert set(requests["output_ids"].map(len)) == {12}
    assert (
        requests.groupby("prompt_index")["output_ids"]
        .agg(lambda o: len(set(map(tuple, o))))
        .eq(1)
        .all()
    )


def test_a_finished_run_is_resumed_without_a_verification(run: Path) -> None:
    done = harness("run", "--resume", run)
    assert done.exit_code == 0, done.output
    assert "finished" in done.output


def test_the_report_says_so_in_its_title_and_verdict(tmp_path: Path) -> None:
    page = Page(build([made_up(tmp_path / "run", synthetic=SYNTHETIC)], tmp_path / "report.html"))
    assert page.text.count(f"qwen2.5-coder, {LABEL}") >= 2
    assert f"On qwen2.5-coder, {LABEL} at temperature 0" in page.text


def test_the_dashboard_says_so_and_keeps_real_runs_apart(tmp_path: Path) -> None:
    made_up(tmp_path / "runs" / "a", synthetic=SYNTHETIC)
    made_up(tmp_path / "runs" / "b")
    site = build_site(tmp_path / "runs", tmp_path / "site", reports=0)
    names = sorted(view.group.pair for view in site.groups)
    assert names == ["qwen2.5-coder", f"qwen2.5-coder, {LABEL}"]
    feed = json.loads((tmp_path / "site" / "feed.json").read_text())
    assert sorted(group["pair"] for group in feed["groups"]) == names


def test_figures_and_their_csv_say_so(tmp_path: Path) -> None:
    written = write_paper([made_up(tmp_path / "run", synthetic=SYNTHETIC)], tmp_path / "out")
    assert written.figures
    for figure in written.figures:
        with (tmp_path / "out" / f"{figure.key}.csv").open() as file:
            assert {row["label"] for row in csv.DictReader(file)} == {LABEL}
        assert LABEL in (tmp_path / "out" / f"{figure.key}.svg").read_text()
    real = write_paper([made_up(tmp_path / "real")], tmp_path / "real-out").figures[0]
    assert "label" not in (tmp_path / "real-out" / f"{real.key}.csv").read_text().split("\n")[0]


@pytest.mark.parametrize("unreal", [{"synthetic": SYNTHETIC}, {"emulated": "emulated:h100"}])
def test_it_is_never_compared_with_a_real_one(tmp_path: Path, unreal: dict[str, str]) -> None:
    real, other = made_up(tmp_path / "real"), made_up(tmp_path / "other", **unreal)
    for options in ((), ("--allow-different-machines",)):
        done = harness("compare", real, other, *options)
        assert done.exit_code == 2
        assert "is all real" in done.output
        assert "their figures do not compare" in done.output
    with pytest.raises(UsageError):
        write_paper([real, other], tmp_path / "out")
    page = Page(build([real, other], tmp_path / "report.html"))
    assert "from unlike machines" in page.text


def test_two_synthetic_runs_compare_and_say_so(tmp_path: Path) -> None:
    runs = [read_run(made_up(tmp_path / name, synthetic=SYNTHETIC)) for name in "ab"]
    found = compare_runs(*runs)
    assert f"both runs are {LABEL}" in found.warnings
    assert all(LABEL in FORMATS[style](found) for style in ("table", "markdown", "json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "ar,ngram,hf"), "methods: ngram, hf cannot have a synthetic acceptance"),
        (("--methods", "ar", "--acceptance", "synthetic:1.5"), "rates between 0 and 1"),
        (("--methods", "ar", "--acceptance", "synthetic:often"), "must look like synthetic:0.8"),
        (("--methods", "ar", "--acceptance", "0.8"), "acceptance"),
        (("--methods", "ar", "--verify"), "leaves nothing to verify"),
        (("--methods", "ar", "--engine", "hf"), "weights: random ones are the lean engine's"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = harness("run", "--no-isolate", *OPTIONS, *arguments, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "run").exists()


def test_random_weights_need_a_coin() -> None:
    with pytest.raises(UsageError, match="random models agree on nothing"):
        load(None, {"pair": "tiny", "weights": "random"})


def test_nothing_is_verified_or_tuned(run: Path, tmp_path: Path) -> None:
    for arguments in ((run,), (*OPTIONS, "--out", tmp_path / "verified")):
        done = harness("verify", *arguments)
        assert done.exit_code == 2
        assert "synthetic, and leaves nothing to verify" in done.output
    config = load(None, {"pair": "tiny", "acceptance": "synthetic:0.7"})
    with pytest.raises(UsageError, match="choices are for a real pair"):
        tune(config, 100, tmp_path / "tuned", lambda: None)


def test_real_weights_may_have_a_coin_too(tmp_path: Path) -> None:
    options = [option for option in OPTIONS if option not in ("--weights", "random")]
    done = harness("run", "--no-isolate", "--methods", "ar", *options, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert label(read_manifest(tmp_path / "run")) == "SYNTHETIC acceptance 0.7"
