"""`harness run` from the command line to the run directory, with decoders of fixed output.

The decoders here emit tokens 0, 1, 2, ... whatever the prompt, so that every count is known.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from harness import registry
from harness.cli import cli
from harness.decoder import (
    Decoder,
    DecoderOptions,
    DecoderSetup,
    FinishReason,
    Request,
    Round,
    Span,
    SpanKind,
    TuningGrid,
)
from harness.errors import DraftProcessError
from harness.store import read_run

RUN = (
    *("run", "--no-isolate", "--pair", "tiny", "--datasets", "mini"),
    *("--prompts", "4", "--max-new-tokens", "6"),
)
CELL_KEYS = {
    *("method", "dataset", "temperature", "batch_size", "requests", "tokens", "tokens_per_s"),
    *("tokens_per_s_per_device", "tpot_ms", "ttft_ms", "acceptance_length", "acceptance_rate"),
    *("hit_rate", "draft_ms", "verify_ms", "wait_ms", "transfer_ms", "speedup"),
}


class Counting(Decoder):
    """Emits 0, 1, 2, ...: one token a round."""

    name: ClassVar[str] = "ar"
    drafted: ClassVar[int] = 0
    alive: ClassVar[set["Counting"]] = set()

    @classmethod
    def create(cls, setup: DecoderSetup) -> "Counting":
        return cls(setup)

    def __init__(self, setup: DecoderSetup) -> None:
        self.setup = setup
        self.live: dict[str, Request] = {}
        self.emitted: dict[str, int] = {}
        self.alive.add(self)

    def start(self, requests: Sequence[Request]) -> None:
        self.live.clear()
        for request in requests:
            self.admit(request)

    def admit(self, request: Request) -> None:
        self.live[request.request_id] = request
        self.emitted[request.request_id] = 0

    def release(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def step(self) -> list[Round]:
        return [self.round(request) for request in self.live.values()]

    def round(self, request: Request) -> Round:
        first = self.emitted[request.request_id]
        last = min(first + self.drafted + 1, request.max_new_tokens)
        self.emitted[request.request_id] = last
        finish = FinishReason.LENGTH if last == request.max_new_tokens else None
        tokens = self.tokens(range(first, last))
        return Round(request.request_id, tokens, self.drafted, self.drafted, finish=finish)

    def tokens(self, positions: range) -> tuple[int, ...]:
        return tuple(positions)

    def close(self) -> None:
        self.alive.discard(self)


class PairsOptions(DecoderOptions):
    tuning_grid: ClassVar[TuningGrid] = {"lookahead": (1, 2)}

    lookahead: int = 1


class Pairs(Counting):
    """The same tokens, two a round."""

    name: ClassVar[str] = "pairs"
    Options: ClassVar[type[DecoderOptions]] = PairsOptions
    needs_draft: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True
    drafted: ClassVar[int] = 1


class Shifted(Counting):
    """Right at first, then one off: no rounding explains it."""

    name: ClassVar[str] = "shifted"

    def tokens(self, positions: range) -> tuple[int, ...]:
        return tuple(i if i < 3 else i + 1 for i in positions)


class Dying(Counting):
    """Loses its draft process at temperature 1, once warm."""

    name: ClassVar[str] = "dying"

    def step(self) -> list[Round]:
        measured = (r for name, r in self.live.items() if not name.startswith("warm-up"))
        if any(request.sampling.temperature == 1 for request in measured):
            raise DraftProcessError("the draft process died (exit code -9)")
        return super().step()


class Miscounting(Counting):
    """Tells the time of every step twice, as drafting and as verifying."""

    name: ClassVar[str] = "miscounting"

    def step(self) -> list[Round]:
        start_ns = time.perf_counter_ns()
        time.sleep(0.002)
        rounds, end_ns = super().step(), time.perf_counter_ns()
        kinds = (SpanKind.DRAFT, SpanKind.VERIFY)
        spans = tuple(Span(kind, start_ns, end_ns) for kind in kinds)
        return [replace(done, spans=spans) for done in rounds]


class Meddling(Counting):
    """Changes how many threads its process has, once warm."""

    name: ClassVar[str] = "meddling"

    def step(self) -> list[Round]:
        import torch

        if not any(name.startswith("warm-up") for name in self.live):
            torch.set_num_threads(2)
        return super().step()


class Unstartable(Counting):
    """Cannot be created."""

    name: ClassVar[str] = "unstartable"

    @classmethod
    def create(cls, setup: DecoderSetup) -> "Counting":
        raise ZeroDivisionError(f"no room for {setup.max_context} tokens")


class Endless(Counting):
    """Sleeps in every step, so that a run of it is still going when a signal arrives."""

    name: ClassVar[str] = "ar"

    def step(self) -> list[Round]:
        time.sleep(0.01)
        return super().step()


def entry_points_of(*decoders: type[Decoder]) -> EntryPoints:
    group = registry.GROUP
    return EntryPoints(EntryPoint(d.name, f"{d.__module__}:{d.__name__}", group) for d in decoders)


@pytest.fixture(autouse=True)
def _fixed_decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our decoders in place of the installed ones; the process's cores and threads as before."""
    import torch

    points = entry_points_of(Counting, Pairs, Shifted, Dying, Meddling, Miscounting, Unstartable)
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    Counting.alive.clear()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def harness(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def shown(directory: Path) -> dict:
    result = harness("show", directory, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_whole_run_is_stored_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grid = ("--methods", "ar,pairs", "--temperatures", "0,1", "--batch-sizes", "1,2")
    result = harness(*RUN, *grid, "--set", "pairs.lookahead=2", "--out", out)
    assert result.exit_code == 0, result.output
    run = read_run(out)
    assert run.manifest["status"] == "finished"
    assert run.manifest["config"]["top_p"] == 1.0
    # ar, its control and pairs, at two temperatures and two batch sizes, on four prompts
    assert len(run.requests) == 3 * 2 * 2 * 4
    assert all(list(ids) == [0, 1, 2, 3, 4, 5] for ids in run.requests["output_ids"])
    decoder = dict(run.manifest["decoders"]["pairs/mini/t0/b1"])
    assert 3 <= decoder.pop("warmup_steps") <= 20
    assert decoder == {
        "options": {"lookahead": 2},
        "tuned": True,
        "automatic": False,
        "tuned_options": [],
        "devices": 2,
        "own_kernels": False,
        "diagnostics": {},
    }
    summary = shown(out)
    assert summary.keys() == {"schema", "cells", "checks", "warnings"}
    cells = summary["cells"]
    assert len(cells) == 12
    for cell in cells:
        assert cell.keys() >= CELL_KEYS
        assert cell["tpot_ms"].keys() == cell["ttft_ms"].keys() == {"p50", "p90", "p95", "p99"}
        assert all(ratio.keys() >= {"value", "low", "high"} for ratio in cell["speedup"].values())
        assert (cell["requests"], cell["tokens"]) == (4, 24)
        assert cell["acceptance_length"] == {"ar": 1.0, "pairs": 2.0}[cell["method"]]
    assert not Counting.alive


def test_a_group_whose_threads_change_is_not_measured_on(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", ("--methods", "ar,meddling", "--block-size", "4")
    result = harness(*RUN, *grid, "--no-control", "--no-verify", "--out", out)
    assert result.exit_code == 1, result.output
    run = read_run(out)
    (failure, *more) = run.manifest["failures"]
    assert failure == {
        "item": "meddling/mini/t0/b1/r0/k0",
        "error": "PlacementError",
        "message": "PyTorch should have 1 threads and has 2",
    }
    assert set(run.requests["method"]) == ({"ar"} if not more else set())
    assert not Counting.alive


def test_variants_of_a_method_are_methods_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "run"
    variants = ("--methods", "ar,pairs:k1.5,pairs:k3", "--set", "pairs:k1.5.lookahead=1")
    result = harness(*RUN, *variants, "--set", "pairs:k3.lookahead=3", "--out", out)
    assert result.exit_code == 0, result.output
    run = read_run(out)
    decoders = {cell: decoder["options"] for cell, decoder in run.manifest["decoders"].items()}
    assert decoders["pairs:k1.5/mini/t0/b1"] == {"lookahead": 1}
    assert decoders["pairs:k3/mini/t0/b1"] == {"lookahead": 3}
    cells = [cell["method"] for cell in shown(out)["cells"]]
    assert cells == ["ar", "ar", "pairs:k1.5", "pairs:k3"]
    assert "pairs:k1.5" in harness("show", out).output
    assert harness("report", out).exit_code == 0
    assert not Counting.alive


def test_the_target_is_only_loaded_to_judge_outputs_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders of fixed output load nothing, so that whatever is loaded is for judging."""
    from impl.engine.models import Models

    loaded, target = [], Models.target

    def loading(models: Models) -> object:
        loaded.append(models)
        return target(models)

    monkeypatch.setattr(Models, "target", loading)
    unverified = (*RUN, "--no-verify", "--methods")
    assert harness(*unverified, "ar,pairs", "--out", tmp_path / "equal").exit_code == 0
    assert loaded == []
    assert harness(*unverified, "ar,shifted", "--out", tmp_path / "other").exit_code == 1
    assert loaded


def test_every_method_gets_the_same_requests_and_the_control_too(tmp_path: Path) -> None:
    harness(*RUN, "--methods", "ar,pairs", "--repeats", "2", "--out", tmp_path / "run")
    requests = read_run(tmp_path / "run").requests
    by_cell = requests.groupby(["method", "control"])["request_id"].agg(set)
    assert len(by_cell) == 3
    assert all(len(ids) == 8 and ids == by_cell.iloc[0] for ids in by_cell)
    assert set(requests["request_id"]) == {
        f"mini/{index}/r{repeat}" for index in set(requests["prompt_index"]) for repeat in (0, 1)
    }


def test_outputs_that_differ_are_classified_by_the_target(tmp_path: Path) -> None:
    harness(*RUN, "--methods", "ar,shifted,pairs", "--out", tmp_path / "run")
    stored = read_run(tmp_path / "run").manifest["greedy"]
    assert stored["compared"] == 3 * 4  # shifted, pairs and the control
    assert len(stored["divergences"]) == 4
    for found in stored["divergences"]:
        assert (found["position"], found["expected"], found["emitted"]) == (3, 3, 4)
        assert found["tie"] is (found["gap"] <= stored["threshold"])
    # two arbitrary logits of a trained model in float32: rounding is far below their distance
    assert stored["threshold"] < 1e-3
    status = {check["cell"]: check["status"] for check in shown(tmp_path / "run")["checks"]}
    assert status["shifted/mini/t0/b1"] == "fail"
    assert status["pairs/mini/t0/b1"] == "pass"


def test_the_methods_of_the_program_agree_on_the_tiny_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "entry_points", importlib.metadata.entry_points)
    out = tmp_path / "run"
    grid = ("--methods", "ar,sd,ssd", "--temperatures", "0,1", "--max-new-tokens", "12")
    result = harness(*RUN, *grid, "--out", out)
    assert result.exit_code == 0, result.output
    summary = shown(out)
    status = {c["cell"]: c["status"] for c in summary["checks"] if c["name"] == "greedy_equality"}
    assert status.keys() == {f"{name}/mini/t0/b1" for name in ("ar@control", "sd", "ssd")}
    assert set(status.values()) <= {"pass", "tie"}
    assert {cell["requests"] for cell in summary["cells"]} == {4}
    assert read_run(out).manifest["decoders"]["ssd/mini/t0/b1"]["devices"] == 2


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grid = ("--methods", "ar,dying", "--temperatures", "0,1", "--no-control")
    result = harness(*RUN, *grid, "--block-size", "2", "--out", out)
    assert result.exit_code == 1
    manifest = read_run(out).manifest
    assert manifest["status"] == "failed"
    assert manifest["failures"] == [
        {
            "item": "dying/mini/t1/b1/r0/k0",
            "error": "DraftProcessError",
            "message": "the draft process died (exit code -9)",
        }
    ]
    measured = {(cell["method"], cell["temperature"]) for cell in shown(out)["cells"]}
    assert measured == {("ar", 0), ("ar", 1), ("dying", 0)}
    assert "failed: dying/mini/t1/b1/r0/k0: DraftProcessError" in result.stderr
    assert "Traceback" not in result.stderr
    assert not Counting.alive


def test_rows_that_do_not_add_up_are_fatal_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = harness(*RUN, "--methods", "ar,miscounting", "--no-control", "--out", out)
    assert result.exit_code == 1
    where = "miscounting/mini/t0/b1/r0/k0 step 0 has spans of "
    assert f"does not add up: {where}" in result.stderr
    (check,) = (c for c in shown(out)["checks"] if c["name"] == "invariants")
    assert (check["status"], where in check["detail"]) == ("fail", True)
    assert len(read_run(out).requests) == 2 * 4


def test_a_method_that_cannot_start_keeps_its_traceback(tmp_path: Path) -> None:
    result = harness(*RUN, "--methods", "unstartable,ar", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "ZeroDivisionError: no room for " in result.stderr
    assert "Traceback" in result.stderr
    assert {cell["method"] for cell in shown(tmp_path / "run")["cells"]} == {"ar"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--methods", "pears"),
            'unknown method "pears": did you mean "pairs"? (see harness methods)',
        ),
        (("--pair", "tinny"), 'unknown pair "tinny": did you mean "tiny"? (see harness pairs)'),
        (
            ("--datasets", "mimi"),
            'unknown dataset "mimi": did you mean "mini"? (see harness datasets)',
        ),
        (
            ("--methods", "pairs", "--set", "pairs.lokahead=2"),
            'unknown option "pairs.lokahead": did you mean "pairs.lookahead"?',
        ),
        (
            ("--set", "pears.lookahead=2"),
            'unknown method "pears": did you mean "pairs"? (see harness methods)',
        ),
        (("--methods", "pairs", "--pair", "smollm2-135m"), "methods: pairs need a draft"),
        (("--target-cores", "9999"), "target_cores: [9999] not on this machine"),
        (
            ("--methods", "pairs", "--draft-cores", "9999"),
            "draft_cores: [9999] not on this machine",
        ),
        (("--target-devices", "cuda:99"), "target_devices: cuda:99 not on this machine"),
        (
            ("--methods", "pairs", "--draft-device", "cuda:99"),
            "draft_device: cuda:99 not on this machine",
        ),
        (
            ("--target-devices", "cpu,cpu", "--engine", "hf"),
            "target_devices: several are the lean engine's; name one",
        ),
        (("--temperatures", "-1"), "temperatures.0: must be >= 0"),
        (("--max-context", "100000"), "max_context: must be <= "),
        (("--promts", "3"), "No such option '--promts'."),
    ],
)
def test_a_usage_error_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    out = tmp_path / "run"
    result = harness(*RUN, "--methods", "ar", *arguments, "--out", out)
    assert result.exit_code == 2
    assert f"error: {line}" in result.stderr.splitlines()[-1]
    assert not out.exists()


def test_a_directory_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    result = harness(*RUN, "--methods", "ar", "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == f"error: {tmp_path}: is not an empty directory; choose another --out\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_leaves_it_readable(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    arguments = [*RUN, "--methods", "ar", "--prompts", "48", "--repeats", "99", "--out", str(out)]
    code = f"import test_run; test_run.run_endlessly({arguments!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[   2/"):
                process.send_signal(number)
                break
        process.stderr.read()
    assert process.returncode == 130
    run = read_run(out)
    assert run.manifest["status"] == "interrupted"
    assert run.manifest["ended"]
    assert len(run.requests) >= 8  # two items of four prompts
    assert shown(out)["cells"][0]["tokens"] == 6 * len(run.requests[~run.requests["control"]])


def run_endlessly(arguments: list[str]) -> None:
    """In a process of its own: a run that lasts until it is interrupted."""
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    points = entry_points_of(Endless)
    registry.entry_points = lambda group: points.select(group=group)  # type: ignore[assignment]
    cli.main(arguments)
