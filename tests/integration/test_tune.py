"""`harness tune`, then `harness run` with what it chose; decoders of known speeds, a fake clock."""

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result
from fake_decoding import FakeClock

from harness import execution, registry
from harness.cli import cli
from harness.decoder import (
    Decoder,
    DecoderOptions,
    DecoderSetup,
    FinishReason,
    Request,
    Round,
    TuningGrid,
)
from harness.measure import run_item
from harness.prompts import load_prompts
from harness.store import read_run
from harness.tuning.choices import Choice, read_choices

CLOCK = FakeClock()
MS = 1_000_000


class Paced(Decoder):
    """`size` tokens a step, which takes `STEP_MS[size]`; without the option one in 10 ms."""

    name: ClassVar[str] = "ar"
    STEP_MS: ClassVar[dict[int, int]] = {1: 10}
    cores: ClassVar[list[set[int]]] = []

    @classmethod
    def create(cls, setup: DecoderSetup) -> "Paced":
        return cls(setup)

    def __init__(self, setup: DecoderSetup) -> None:
        self.size = getattr(setup.options, "size", 1)
        self.left: dict[str, int] = {}

    def start(self, requests: Sequence[Request]) -> None:
        self.left = {request.request_id: request.max_new_tokens for request in requests}

    def admit(self, request: Request) -> None:
        self.left[request.request_id] = request.max_new_tokens

    def release(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def step(self) -> list[Round]:
        if self.size not in self.STEP_MS:
            raise ArithmeticError(f"no speed for size {self.size}")
        CLOCK.advance(self.STEP_MS[self.size] * MS)
        self.cores.append(os.sched_getaffinity(0))
        return [self._round(name) for name in self.left]

    def _round(self, name: str) -> Round:
        emitted = min(self.size, self.left[name])
        self.left[name] -= emitted
        finish = None if self.left[name] else FinishReason.LENGTH
        return Round(name, (7,) * emitted, self.size - 1, emitted - 1, finish=finish)

    def close(self) -> None:
        pass


class Few(Paced):
    """Fastest at size 2: 100, 200, 120 tokens a second."""

    name: ClassVar[str] = "few"
    STEP_MS: ClassVar[dict[int, int]] = {1: 10, 2: 10, 3: 25}

    class Options(DecoderOptions):
        tuning_grid: ClassVar[TuningGrid] = {"size": (1, 2, 3)}

        size: int = 1
        note: str = ""


class Many(Paced):
    """Fastest at size 8 of nine sizes, the last of which fails."""

    name: ClassVar[str] = "many"
    STEP_MS: ClassVar[dict[int, int]] = {1: 9, 2: 18, 3: 20, 4: 20, 5: 20, 6: 20, 7: 20, 8: 20}

    class Options(DecoderOptions):
        tuning_grid: ClassVar[TuningGrid] = {"size": range(1, 10)}  # type: ignore[assignment]

        size: int = 1


@pytest.fixture(autouse=True)
def _decoders_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = EntryPoints(
        EntryPoint(d.name, f"{__name__}:{d.__name__}", registry.GROUP) for d in (Paced, Few, Many)
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    monkeypatch.setattr(execution, "run_item", functools.partial(run_item, clock=CLOCK))
    Paced.cores.clear()
    yield
    assert importlib.metadata.entry_points is not registry.entry_points


def harness(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def common(folder: Path) -> tuple[str | Path, ...]:
    cache = folder / "cache"
    return ("--no-isolate", "--pair", "tiny", "--datasets", "mini", "--cache-dir", cache)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `few` and `many` have been tuned with 216 rounds each."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        fixture = _decoders_of_known_speed.__wrapped__(patch)  # the same decoders, once a module
        next(fixture)
        result = harness(
            "tune", "--methods", "ar,few,many", *common(folder), "--rounds", "216",
            "--max-new-tokens", "200", "--out", folder / "runs",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    return folder


def choices(folder: Path) -> dict[str, Choice]:
    return {choice.method: choice for choice in read_choices(folder / "cache/tuned")}


def test_the_fastest_candidate_is_chosen_and_every_method_has_the_same_rounds(tuned: Path):
    found = choices(tuned)
    assert found.keys() == {"few", "many"}  # ar has nothing to tune
    assert (found["few"].options, found["many"].options) == ({"size": 2}, {"size": 8})
    # three candidates have one rung, 72 rounds each; nine have two, 12 each and then 36 each, but
    # the one that fails spends none of its own: the last three share what it left
    assert [c.rounds for c in found["few"].candidates] == [72] * 3
    assert [c.rounds for c in found["many"].candidates] == [12] * 8 + [0] + [40] * 3
    assert found["few"].rounds == found["many"].rounds == 216
    speeds = {c.options["size"]: c.tokens_per_s.value for c in found["few"].candidates}
    assert speeds == pytest.approx({1: 100, 2: 200, 3: 120})


def test_a_candidate_that_fails_is_told_and_the_others_go_on(tuned: Path):
    failed = [c for c in choices(tuned)["many"].candidates if c.failure]
    assert [(c.options, c.kept, c.tokens_per_s.value) for c in failed] == [
        ({"size": 9}, False, None)
    ]
    assert failed[0].failure == "ArithmeticError: no speed for size 9"


def test_the_evidence_names_the_runs_and_the_prompts_that_no_evaluation_has(tuned: Path):
    found = choices(tuned)["many"]
    assert [Path(run).name for run in found.runs] == ["rung-0", "rung-1"]
    measured = {
        index for run in found.runs for index in read_run(Path(run)).requests["prompt_index"]
    }
    everything = {p.index: p.sha256 for p in load_prompts("mini").prompts}
    assert {everything[index] for index in measured} == set(found.prompts["mini"])
    evaluated = {p.sha256 for p in load_prompts("mini", split="evaluation").prompts}
    assert not evaluated & set(found.prompts["mini"])


def run(folder: Path, out: Path, *arguments: str) -> dict:
    base = ("run", "--methods", "ar,few,many", *common(folder), "--prompts", "2")
    result = harness(*base, "--max-new-tokens", "8", "--no-verify", "--out", out, *arguments)
    assert result.exit_code == 0, result.output
    return {**read_run(out).manifest, "shown": result.output}


def decoders(manifest: dict) -> dict[str, tuple[dict, bool, list[str]]]:
    return {
        cell.partition("/")[0]: (found["options"], found["tuned"], found["tuned_options"])
        for cell, found in manifest["decoders"].items()
    }


def test_a_run_uses_what_was_tuned_and_keeps_the_evidence(tuned: Path, tmp_path: Path):
    manifest = run(tuned, tmp_path / "run")
    assert decoders(manifest)["few"] == ({"size": 2, "note": ""}, True, ["size"])
    assert decoders(manifest)["many"] == ({"size": 8}, True, ["size"])
    assert decoders(manifest)["ar"] == ({}, None, [])
    kept = [Choice.model_validate(values) for values in manifest["tuning"]["choices"]]
    assert kept == [choices(tuned)["few"], choices(tuned)["many"]]
    assert "untuned" not in manifest["shown"]
    page = tmp_path / "report.html"
    assert harness("report", tmp_path / "run", "--out", page).exit_code == 0
    text = page.read_text()
    assert "How methods were tuned" in text
    assert "200.0 [200.0, 200.0]" in text  # size 2 of `few`, every prompt alike


def test_set_wins_over_tuning_option_by_option(tuned: Path, tmp_path: Path):
    manifest = run(tuned, tmp_path / "a", "--set", "few.size=3", "--set", "many.size=1")
    assert decoders(manifest)["few"] == ({"size": 3, "note": ""}, True, [])
    manifest = run(tuned, tmp_path / "b", "--set", "few.note=x")
    assert decoders(manifest)["few"] == ({"size": 2, "note": "x"}, True, ["size"])


def test_no_tuned_and_another_placement_run_on_defaults_and_say_so(tuned: Path, tmp_path: Path):
    manifest = run(tuned, tmp_path / "a", "--no-tuned")
    assert decoders(manifest)["few"] == ({"size": 1, "note": ""}, False, [])
    assert "few (untuned)" in manifest["shown"]
    manifest = run(tuned, tmp_path / "b", "--placement", "pooled")
    assert decoders(manifest)["few"] == ({"size": 1, "note": ""}, False, [])
    assert "few (greedy, batch size 1): tuned on another machine or placement (placement.conv" in (
        " ".join(manifest["tuning"]["unused"])
    )
    assert "few ran with default parameters" in manifest["shown"]
    assert "pooled placement" in manifest["shown"]
    assert {found["devices"] for found in manifest["decoders"].values()} == {2}
    assert {0, 1} in Paced.cores  # on both cores of the placement


def test_all_prompts_may_be_run_but_then_nothing_tuned_is_used(tuned: Path, tmp_path: Path):
    base = ("run", "--methods", "few", *common(tuned), "--max-new-tokens", "2", "--no-verify")
    assert harness(*base, "--split", "all", "--out", tmp_path / "run").exit_code == 0
    manifest = read_run(tmp_path / "run").manifest
    assert manifest["tuning"]["unused"] == [
        "few (greedy, batch size 1): tuned on prompts that this run measures"
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--methods", "ar"), "error: methods: none of ar has anything to tune"),
        (("--methods", "many", "--rounds", "17"), "takes at least 18 rounds, not 17"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(tmp_path, arguments, line):
    result = harness("tune", *common(tmp_path), "--out", tmp_path / "runs", *arguments)
    assert result.exit_code == 2
    assert line in result.output
    assert not (tmp_path / "runs").exists()


def test_a_method_whose_every_candidate_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Few, "STEP_MS", {})
    base = ("tune", "--methods", "few", *common(tmp_path), "--rounds", "9")
    result = harness(*base, "--out", tmp_path / "runs")
    assert result.exit_code == 1
    assert "error: few: every candidate failed; the first: ArithmeticError" in result.output
    assert not list((tmp_path / "cache").glob("tuned/*"))
    assert json.loads((tmp_path / "runs/few-t0-b1/rung-0/manifest.json").read_text())["failures"]


def test_what_was_chosen_before_another_method_failed_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(Many, "STEP_MS", {})
    base = ("tune", "--methods", "few,many", *common(tmp_path), "--rounds", "216")
    result = harness(*base, "--out", tmp_path / "runs")
    assert result.exit_code == 1
    assert "error: many: every candidate failed" in result.output
    assert {choice.method: choice.options for choice in read_choices(tmp_path / "cache/tuned")} == {
        "few": {"size": 2}
    }


def test_few_rounds_a_candidate_are_warned_of_before_anything_runs(tmp_path):
    base = ("tune", "--methods", "few,many", *common(tmp_path), "--rounds", "24")
    result = harness(*base, "--out", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    first, *_ = result.output.splitlines()
    assert first.startswith("warning: many (greedy, batch size 1): 9 candidates share 12 rounds")
    assert "warning: few" not in result.output  # 24 rounds of 3 candidates


def test_a_rung_warms_up_on_the_end_of_a_prompt_and_measures_whole_ones(tmp_path, monkeypatch):
    sizes: dict[bool, set[int]] = {True: set(), False: set()}  # by whether it is a warm-up
    start = Few.start

    def watched(self: Few, requests: Sequence[Request]) -> None:
        for request in requests:
            sizes[request.request_id.startswith("warm-up")].add(len(request.prompt_ids))
        start(self, requests)

    monkeypatch.setattr(Few, "start", watched)
    base = ("tune", "--methods", "few", *common(tmp_path), "--rounds", "216")
    assert harness(*base, "--out", tmp_path / "runs").exit_code == 0
    assert max(sizes[True]) <= 32 < max(sizes[False])
    sizes[True].clear()
    run(tmp_path, tmp_path / "run", "--no-tuned")
    assert max(sizes[True]) > 32  # a run that is quoted warms up on whole ones


@pytest.mark.slow
def test_sd_and_ssd_are_tuned_on_the_tiny_pair_and_run_with_it(tmp_path):
    """The real methods in processes of their own, as a user has them."""
    base = ("--methods", "sd,ssd", "--pair", "tiny", "--datasets", "mini", "--cache-dir", "cache")
    few = ("--set", "ssd.budget=4", "--set", "sd.stop_below=0", "--max-new-tokens", "48")
    for command in (
        ("tune", *base, *few, "--rounds", "96", "--out", "tune"),
        ("run", *base, *few[:4], "--prompts", "2", "--max-new-tokens", "8", "--out", "run"),
    ):
        program = [sys.executable, "-c", "from harness.cli import main; main()", *command]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    manifest = read_run(tmp_path / "run").manifest
    used = {choice["method"]: choice["options"] for choice in manifest["tuning"]["choices"]}
    assert used.keys() == {"sd", "ssd"}
    for cell, found in manifest["decoders"].items():
        assert found["tuned_options"] == ["lookahead"]
        assert found["options"]["lookahead"] == used[cell.partition("/")[0]]["lookahead"]
