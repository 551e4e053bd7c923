"""Several runs of one plan taken together, on runs whose every step time is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_decoding import EOS, decode, emit

from harness.cli import cli
from harness.plan import Cell
from harness.records import ItemResult
from harness.store import RunStore

TIMES = {"r1": (60, 40), "r2": (75, 125), "r3": (30, 20)}  # nanoseconds of SD on both prompts
REACH = float(np.hypot(4.302653 * np.log(2) / np.sqrt(3), 12.706205 * 0.05))  # see test_statistics
HOSTILE = "[bold red]\x1b[2J\x07|<img src=x>`*_["


def results(dataset: str, sd_times: tuple[int, ...], temperature: float = 0.0) -> list[ItemResult]:
    """AR takes 200 ns a prompt; SD emits the same two tokens in one step of the time told."""
    names = [f"{dataset}/{index}/r0" for index in range(len(sd_times))]
    slow = {name: [emit(name, 1), emit(name, 9, finish=EOS)] for name in names}
    quick = {name: [emit(name, 1, 9, finish=EOS)] for name in names}
    ar, sd = (Cell(method, dataset, temperature, 1) for method in ("ar", "sd"))
    return [decode(ar, slow, step_ns=100), decode(sd, quick, step_ns=sd_times.__getitem__)]


def write(directory: Path, *items: ItemResult, status: Any = "finished", **manifest: Any) -> Path:
    store = RunStore.create(directory, manifest)
    for item in items:
        store.append_item(item)
    store.finalise(status)
    return directory


def three(folder: Path, **manifest: Any) -> list[Path]:
    return [write(folder / n, *results("mini", times), **manifest) for n, times in TIMES.items()]


def show(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, arguments)])


def shown(*arguments: object) -> str:
    result = show(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def sd_over_ar(*runs: Path) -> list[dict[str, Any]]:
    speedups = json.loads(show(*runs, "--json").output)["speedups"]
    return [own for own in speedups if own["method"] == "sd"]


def test_each_runs_speedup_their_mean_and_the_interval(tmp_path: Path) -> None:
    runs = three(tmp_path)
    (found,) = sd_over_ar(*runs)
    assert found["baseline"] == "ar"
    assert found["datasets"] == ["mini"]
    assert found["speedup"]["runs"] == pytest.approx([4, 2, 8])
    assert found["speedup"]["value"] == pytest.approx(4)
    assert found["speedup"]["low"] == pytest.approx(4 * np.exp(-REACH))
    assert found["speedup"]["high"] == pytest.approx(4 * np.exp(REACH))
    told = shown(*runs)
    assert "mini, temperature 0, batch size 1, equal-target placement" in told
    assert "sd over ar 4.00 2.00 8.00 4.00 [0.64, 25.07] 69.3%" in told  # ln 2 = 0.693
    assert "0.25 [0.04, 1.57] 69.3%" in told  # AR over SD
    assert f"3 runs, in this order: {', '.join(map(str, runs))}." in told


def test_two_runs_say_that_they_are_too_few(tmp_path: Path) -> None:
    told = shown(*three(tmp_path)[:2])
    assert "sd over ar 4.00 2.00 2.83 [no interval] 49.0%" in told
    assert "warning: 2 runs do not say how much runs differ, so there are no intervals" in told


def test_markdown(tmp_path: Path) -> None:
    told = shown(*three(tmp_path), "--markdown")
    assert "| method | each run | runs together | run to run | | --- | --: | --: | --: |" in told
    assert r"| sd over ar | 4.00 2.00 8.00 | 4.00 \[0.64, 25.07] | 69.3% |" in told


def test_several_datasets_are_also_taken_together(tmp_path: Path) -> None:
    # mini is 4, 2, 8 as above; own is always 2 and its prompts alike: the roots of 8, 4 and 16
    runs = [
        write(tmp_path / name, *results("mini", times), *results("own", (100, 100)))
        for name, times in TIMES.items()
    ]
    by_datasets = {tuple(own["datasets"]): own["speedup"] for own in sd_over_ar(*runs)}
    assert list(by_datasets) == [("mini",), ("own",), ("mini", "own")]
    both = by_datasets["mini", "own"]
    assert both["runs"] == pytest.approx([8**0.5, 2, 4])
    assert both["value"] == pytest.approx(8**0.5)
    assert both["high"] / both["value"] == pytest.approx(np.exp(REACH / 2))
    assert "2 datasets together, temperature 0" in shown(*runs)


def test_temperatures_are_apart(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, *results("mini", times), *results("mini", (50, 50), 1.0))
        for name, times in TIMES.items()
    ]
    found = {own["temperature"]: own["speedup"]["value"] for own in sd_over_ar(*runs)}
    assert found == pytest.approx({0.0: 4, 1.0: 4})


@pytest.mark.parametrize(
    ("field", "values", "told"),
    [
        ("fingerprint", [{"cpu": {"model": m}} for m in "ab"], "machine cpu.model: 'a' and 'b'"),
        ("fingerprint", [{}, {"synthetic": "0.8"}], "machine synthetic: None and '0.8'"),
        ("config", [{"max_new_tokens": n} for n in (2, 4)], "config max_new_tokens: 2 and 4"),
        (
            "decoders",
            [{"sd/mini/t0/b1": {"options": {"lookahead": n}}} for n in (4, 5)],
            "sd/mini/t0/b1 lookahead: 4 and 5",
        ),
        ("datasets", [{"mini": {"sha256": s}} for s in "ab"], "mini: other prompts in each run"),
        ("pair", [{"draft": {"sha256": s}} for s in "ab"], "the draft's weights"),
    ],
)
def test_runs_that_differ_are_refused_by_name(
    tmp_path: Path, field: str, values: list[Any], told: str
) -> None:
    same, other = (
        write(tmp_path / name, *results("mini", TIMES[name]), **{field: value})
        for name, value in zip(("r1", "r2"), values, strict=True)
    )
    again = write(tmp_path / "r3", *results("mini", TIMES["r3"]), **{field: values[0]})
    result = show(same, again, other)
    assert result.exit_code == 2
    assert f"{same} and {other} are not runs of one plan on one machine: " in result.output
    assert told in result.output


def test_cells_and_prompts_that_one_run_lacks_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", *results("mini", (60, 40)))
    shorter = write(tmp_path / "shorter", *results("mini", (60,)), status="interrupted")
    assert "mini: 1 prompts in common, of 2 and 1" in show(whole, shorter).output
    without = write(tmp_path / "without", results("mini", (60, 40))[0])
    assert f"only in {whole}: sd/mini/t0/b1" in show(whole, without).output


def test_what_is_not_of_the_plan_is_warned_about(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, *results("mini", times), git={"revision": name}, status=status)
        for (name, times), status in zip(
            TIMES.items(), ("finished", "finished", "failed"), strict=True
        )
    ]
    told = shown(*runs)
    assert f"{runs[0]} and {runs[2]} differ in revision: r1 and r3" in told
    assert f"{runs[2]} is failed" in told


def test_a_failed_check_of_one_run_is_told(tmp_path: Path) -> None:
    control = Cell("ar", "mini", 0.0, 1, control=True)
    runs = []
    for name, times in TIMES.items():
        names = ["mini/0/r0", "mini/1/r0"]
        slow = {each: [emit(each, 1), emit(each, 9, finish=EOS)] for each in names}
        again = decode(control, slow, step_ns=150 if name == "r2" else 100)
        runs.append(write(tmp_path / name, *results("mini", times), again))
    told = shown(*runs)
    assert f"warning: {runs[1]}: aa_control failed: " in told
    assert f"{runs[0]}: aa_control" not in told
    assert "ar@control over ar 1.00 0.67 1.00 " in told


def test_a_cell_that_is_degraded_in_one_run_is_left_out(tmp_path: Path) -> None:
    broken = {"sd/mini/t0/b1": {"diagnostics": {"degraded": "draft process 7: died"}}}
    decoders = {"r1": {}, "r2": broken, "r3": {}}
    runs = [
        write(tmp_path / name, *results("mini", times), decoders=decoders[name])
        for name, times in TIMES.items()
    ]
    told = shown(*runs)
    assert "over ar" not in told
    assert f"warning: sd/mini/t0/b1 is degraded in {runs[1]}" in told


def test_the_same_measurements_twice_are_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "run", *results("mini", (60, 40)))
    assert "is named twice" in show(run, run).output
    copy = write(tmp_path / "copy", *results("mini", (60, 40)))
    result = show(run, copy)
    assert result.exit_code == 2
    assert f"{run} and {copy} hold the same measurements" in result.output


def test_what_is_not_real_says_so(tmp_path: Path) -> None:
    runs = three(tmp_path, fingerprint={"synthetic": "acceptance 0.8"})
    for options in ([], ["--markdown"]):
        assert "equal-target placement, SYNTHETIC acceptance 0.8" in shown(*runs, *options)
    assert json.loads(show(*runs, "--json").output)["label"] == "SYNTHETIC acceptance 0.8"


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_hostile_names_are_inert(tmp_path: Path, options: list[str]) -> None:
    runs = [
        write(tmp_path / name, *results(HOSTILE, times), git={"revision": HOSTILE + name})
        for name, times in TIMES.items()
    ]
    output = show(*runs, *options).output
    assert "\x1b" not in output
    assert "\x07" not in output
    assert "[bold red]" in output.replace("\\", "")
    if options:
        assert "\\|\\<img src=x\\>\\`\\*\\_\\[" in output


def test_latency_is_of_one_run(tmp_path: Path) -> None:
    result = show(*three(tmp_path), "--latency")
    assert result.exit_code == 2
    assert "--latency shows one run at a time" in result.output
