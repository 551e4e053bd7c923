"""`harness compare` on stored runs whose every step time is known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from fake_decoding import EOS, decode, emit, stored

from harness.cli import cli
from harness.commands.compare import _FORMATS
from harness.comparison import Verdict, compare_runs
from harness.comparison_formats import FORMATS
from harness.decoder import Round, Span, SpanKind
from harness.errors import StoreError, UsageError
from harness.plan import Cell
from harness.records import ItemResult
from harness.store import RunData

AR = Cell("ar", "mini", 0.0, 1)
CONTROL = Cell("ar", "mini", 0.0, 1, control=True)
SD = Cell("sd", "mini", 0.0, 1)
MS = 1_000_000
PREFILL, START = 100, 1000  # nanoseconds, of the fake clock
PROMPTS = 12


def item(
    cell: Cell,
    rng: random.Random,
    *,
    verify: float = 1.0,
    tokens: int = 1,
    noise: float = 0.01,
    prompts: range = range(PROMPTS),
) -> ItemResult:
    """Rounds of 2 ms drafting and 8 ms verifying, times `verify`; each prompt off by `noise`."""
    now, times, script = START, [], {}
    for index in prompts:
        now += PREFILL
        own = rng.lognormvariate(0, noise)
        rounds: list[Round] = []
        for number in range(10 + index):
            middle = now + round(2 * MS * own)
            end = middle + round(8 * MS * verify * own)
            spans = (Span(SpanKind.DRAFT, now, middle), Span(SpanKind.VERIFY, middle, end))
            last = EOS if number == 9 + index else None
            rounds.append(emit("", *range(tokens), finish=last, spans=spans))
            times.append(end - now)
            now = end
        name = f"mini/{index}/r0"
        script[name] = [
            Round(name, r.tokens, r.drafted, r.accepted, r.spans, r.finish) for r in rounds
        ]
    return decode(cell, script, step_ns=times.__getitem__)


def run(
    directory: Path,
    seed: int,
    *,
    aa: float = 1.0,
    control: bool = True,
    manifest: dict[str, Any] | None = None,
    **sd: Any,
) -> RunData:
    """AR, its control at `aa` times the time, and SD as told."""
    rng = random.Random(seed)
    prompts = sd.get("prompts", range(PROMPTS))
    items = [item(AR, rng, prompts=prompts), item(SD, rng, **{"tokens": 3, **sd})]
    if control:
        again = item(CONTROL, rng, prompts=prompts, verify=aa)
        items.append(again)
    return stored(directory, *items, **(manifest or {}))


def sd_of(base: RunData, new: RunData, **options: Any):
    (found,) = (c for c in compare_runs(base, new, **options).cells if c.cell == SD)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_slowdown_is_caught_and_an_unchanged_rerun_passes(tmp_path, seed):
    base = run(tmp_path / "base", 3 * seed)
    again = compare_runs(base, run(tmp_path / "again", 3 * seed + 1))
    assert again.regressions == ()
    # 8 of 10 ms take 10% longer: 0.8 ms, 8% of the step
    slower = compare_runs(base, run(tmp_path / "slower", 3 * seed + 2, verify=1.1))
    (found,) = slower.regressions
    assert found.cell == SD
    assert found.speed.value == pytest.approx(1 / 1.08, abs=0.02)
    assert found.factors.slowest == "step time"
    assert found.factors.span == "verify"
    assert found.factors.span_ms == pytest.approx(0.8, abs=0.2)


def test_without_noise_everything_is_known(tmp_path):
    base = run(tmp_path / "base", 0, noise=0)
    found = sd_of(base, run(tmp_path / "new", 0, noise=0, verify=1.1))
    assert (found.speed.value, found.speed.n) == (pytest.approx(1 / 1.08), PROMPTS)
    assert (found.speed.low, found.speed.high) == pytest.approx((1 / 1.08, 1 / 1.08))
    assert found.paired
    assert found.p_value == pytest.approx(2 / 2**PROMPTS)  # all prompts slower, by enumeration
    assert found.adjusted == pytest.approx(2 * found.p_value)  # two cells, this one the smaller
    assert found.factors.blame == "step time (verify +0.8 ms)"


def test_fewer_tokens_a_round_are_blamed_on_acceptance(tmp_path):
    base = run(tmp_path / "base", 0, tokens=3)
    found = sd_of(base, run(tmp_path / "new", 1, tokens=2))
    assert (found.verdict, found.factors.blame) == (Verdict.REGRESSION, "acceptance")
    assert found.factors.acceptance == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("verify", "verdict"),
    [
        (0.9, Verdict.FASTER),
        (1.0, Verdict.SAME),
        (1.03, Verdict.SLOWER),  # 2.4%: surely slower, surely not by 5%
        (1.1, Verdict.REGRESSION),
    ],
)
def test_verdicts(tmp_path, verify, verdict):
    base = run(tmp_path / "base", 0, noise=0.001)
    assert sd_of(base, run(tmp_path / "new", 1, noise=0.001, verify=verify)).verdict == verdict


def test_the_gate_is_no_tighter_than_the_noise(tmp_path):
    # the newer run's control is 8% slower than AR itself: so is SD, and no blame is due
    base = run(tmp_path / "base", 0)
    comparison = compare_runs(base, run(tmp_path / "new", 1, verify=1.1, aa=1.125))
    found = next(cell for cell in comparison.cells if cell.cell == SD)
    assert found.verdict is Verdict.SLOWER
    assert found.gate == found.noise == pytest.approx(0.1, abs=0.015)
    (warning,) = comparison.warnings
    assert warning.startswith("mini, temperature 0, batch size 1: AR differs from itself by up to ")


def test_unknown_noise_is_warned_about(tmp_path):
    base = run(tmp_path / "base", 0, control=False)
    comparison = compare_runs(base, run(tmp_path / "new", 1, verify=1.1), ("a", "b"))
    assert len(comparison.regressions) == 1
    (warning,) = comparison.warnings
    assert "no A/A control in a, its noise is unknown" in warning


def test_only_what_is_common_is_compared_and_the_rest_is_named(tmp_path):
    base = run(
        tmp_path / "base",
        0,
        manifest={"config": {"max_new_tokens": 48}, "git": {"revision": "aaa"}},
    )
    items = [item(AR, random.Random(1), prompts=range(4, 16))]
    items.append(item(Cell("tree", "mini", 0.0, 1), random.Random(1), prompts=range(4, 16)))
    changes = {"config": {"max_new_tokens": 64}, "git": {"revision": "bbb"}}
    comparison = compare_runs(base, stored(tmp_path / "new", *items, **changes), ("a", "b"))
    (found,) = comparison.cells
    assert (found.cell, found.speed.n, found.paired) == (AR, 8, True)
    assert comparison.differences == (
        f"only in a: {CONTROL.id}",
        f"only in a: {SD.id}",
        "only in b: tree/mini/t0/b1",
        "config max_new_tokens: 48 and 64",
        "mini: 8 prompts in common, of 12 and 12",
        "revision: aaa and bbb",
    )


def test_other_prompts_are_compared_unpaired(tmp_path):
    sha = [{"datasets": {"mini": {"sha256": name}}} for name in "ab"]
    base = run(tmp_path / "base", 0, manifest=sha[0])
    comparison = compare_runs(base, run(tmp_path / "new", 1, manifest=sha[1], verify=1.5))
    found = next(cell for cell in comparison.cells if cell.cell == SD)
    assert not found.paired
    assert found.speed.value == pytest.approx(1 / 1.4, abs=0.03)
    assert found.verdict is Verdict.REGRESSION
    assert "mini: other prompts in each run, so its cells do not pair" in comparison.differences


def test_one_prompt_decides_nothing(tmp_path):
    base = run(tmp_path / "base", 0, prompts=range(1))
    comparison = compare_runs(base, run(tmp_path / "new", 1, prompts=range(1), verify=3.0))
    assert {cell.verdict for cell in comparison.cells} == {Verdict.UNDECIDED}
    assert "sd/mini/t0/b1: 1 prompts, too few to compare" in comparison.warnings


def test_unlike_machines_are_refused_unless_allowed(tmp_path):
    cpus = [{"fingerprint": {"cpu": {"model": name}}} for name in ("EPYC", "Xeon")]
    base, new = (run(tmp_path / n, 0, manifest=cpu) for n, cpu in zip("ab", cpus, strict=True))
    with pytest.raises(UsageError, match=r"unlike machines \(cpu.model: 'EPYC' and 'Xeon'\)"):
        compare_runs(base, new)
    comparison = compare_runs(base, new, allow_different_machines=True)
    assert comparison.warnings[0] == (
        "the machines differ, so do speeds: cpu.model: 'EPYC' and 'Xeon'"
    )


def test_a_run_that_does_not_add_up_is_refused(tmp_path):
    base = run(tmp_path / "base", 0)
    base.rounds.loc[0, "accepted"] = 99
    with pytest.raises(StoreError, match="BASE: its rows do not add up: "):
        compare_runs(base, run(tmp_path / "new", 0))


def test_nothing_in_common_is_an_error(tmp_path):
    base = stored(tmp_path / "base", item(AR, random.Random(0)))
    with pytest.raises(UsageError, match="have no cell in common"):
        compare_runs(base, stored(tmp_path / "new", item(SD, random.Random(0))))


def compare(tmp_path: Path, *options: str) -> Result:
    arguments = ["compare", str(tmp_path / "base"), str(tmp_path / "new"), *options]
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def slower(tmp_path):
    run(tmp_path / "base", 0)
    run(tmp_path / "new", 1, verify=1.1)


@pytest.mark.usefixtures("slower")
def test_only_a_gate_fails(tmp_path):
    assert compare(tmp_path).exit_code == 0
    assert compare(tmp_path, "--fail-on-regression", "5%").exit_code == 1
    assert compare(tmp_path, "--fail-on-regression", "0.2").exit_code == 0


@pytest.mark.parametrize("share", ["5 percent", "-1%", "100%", "nan"])
def test_a_gate_that_is_no_share_is_a_usage_error(tmp_path, share):
    result = compare(tmp_path, "--fail-on-regression", share)
    assert result.exit_code == 2
    assert "must look like 5% or 0.05" in result.stderr


def test_every_format_can_be_chosen():
    assert set(FORMATS) == set(_FORMATS)


@pytest.mark.usefixtures("slower")
def test_table(tmp_path):
    told = " ".join(compare(tmp_path).output.split())
    assert "sd/mini/t0/b1 0.9" in told
    assert "regression: step time (verify +0." in told
    assert "1 of 2 cells regressed" in told


@pytest.mark.usefixtures("slower")
def test_markdown(tmp_path):
    lines = compare(tmp_path, "--format", "markdown").output.splitlines()
    assert lines[0].startswith("### Speed of ")
    table = [line for line in lines if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table} == {9}
    assert "- 1 of 2 cells regressed" in lines


@pytest.mark.usefixtures("slower")
def test_json(tmp_path):
    found = json.loads(compare(tmp_path, "--format", "json").output)
    assert (found["schema"], found["regressions"], found["tolerance"]) == (1, 1, 0.05)
    cell = next(cell for cell in found["cells"] if cell["id"] == SD.id)
    assert cell["verdict"] == "regression"
    assert cell["speed"]["high"] < 0.95
    assert cell["factors"]["span"] == "verify"


@pytest.mark.usefixtures("slower")
def test_junit(tmp_path):
    suite = ElementTree.fromstring(compare(tmp_path, "--format", "junit").output)
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "2", "1")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [SD.id]


def test_names_cannot_leave_their_cell_of_a_markdown_table(tmp_path):
    hostile = Cell("x|<b>`[a](b)", "mini", 0.0, 1)
    for name in ("base", "new"):
        stored(tmp_path / name, item(hostile, random.Random(0)))
    told = compare(tmp_path, "--format", "markdown").output
    assert r"x\|\<b\>\`\[a](b)/mini/t0/b1" in told
