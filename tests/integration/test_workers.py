"""`harness run` with its fresh worker processes, on the tiny pair: killed, interrupted, resumed."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.store import finished_items, read_manifest, read_run

HERE = Path(__file__).parent
TINY = ("--pair", "tiny", "--datasets", "mini", "--warmup-steps", "1")
PLUGIN = "[harness.decoders]\nkilled = faulty_decoders:Killed\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a package installed whose method gets its process killed."""
    package = tmp_path / "plugin" / "faulty-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(PLUGIN)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package.parent, HERE)))}


def harness(environment: dict[str, str], *arguments: str | Path) -> subprocess.Popen[str]:
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heard + "from harness.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", *map(str, arguments)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    return iter(process.stderr.readline, "")


def test_a_killed_worker_fails_its_group_and_the_run_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "run"
    grid = ("--methods", "ar,killed", "--temperatures", "0,1", "--prompts", "4", "--no-verify")
    limits = ("--max-new-tokens", "4", "--block-size", "2", "--no-control")
    with harness(environment, *TINY, *grid, *limits, "--out", out) as process:
        stderr = "".join(lines_of(process))
    assert process.returncode == 1, stderr
    manifest = read_manifest(out)
    assert manifest["status"] == "failed"
    assert manifest["command"][1:] == ["run", *TINY, *grid, *limits, "--out", str(out)]
    reason = "the worker was killed by SIGKILL (out of memory, or by hand)"
    greedy = [item for item in manifest["plan"] if "/t0/" in item]
    left = [item for item in greedy if item not in manifest["finished_items"]]
    first = {item.split("/")[0]: item for item in reversed(left)}
    assert first["killed"] == "killed/mini/t0/b1/r0/k0"
    assert manifest["failures"] == [
        {"item": item, "error": "WorkerError", "message": reason} for item in first.values()
    ]
    assert finished_items(out) == set(manifest["plan"]) - set(left)  # all of the other group
    assert f"failed: killed/mini/t0/b1/r0/k0: WorkerError: {reason}" in stderr
    assert manifest["workers"]["environment"]["OMP_NUM_THREADS"] == "1"


def test_an_interrupt_ends_every_process_at_once(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "run"
    endless = ("--methods", "ar,ssd", "--repeats", "99", "--max-new-tokens", "32")
    with harness(environment, *TINY, *endless, "--out", out) as process:
        for line in lines_of(process):
            if " 2/" in line:
                break
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 2  # the worker and its draft process
        process.send_signal(signal.SIGINT)
        rest = "".join(lines_of(process))
    assert process.returncode == 130, rest
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert read_manifest(out)["status"] == "interrupted"
    assert len(finished_items(out)) >= 2


@pytest.mark.slow
def test_killed_three_times_and_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    """The outputs are those of a run that nobody disturbed, every item once."""
    grid = ("--methods", "ar,sd", "--temperatures", "0,1", "--prompts", "8", "--no-verify")
    run = (*TINY, *grid, "--max-new-tokens", "16", "--block-size", "1")
    out, whole, moments = tmp_path / "run", tmp_path / "whole", random.Random(3)
    done: set[str] = set()
    for start in ((*run, "--out", out), ("--resume", out), ("--resume", out)):
        with harness(environment, *start) as process:
            for line in lines_of(process):
                if line.startswith("[") and moments.random() < 0.2:
                    break
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            "".join(lines_of(process))
        assert psutil.wait_procs(below, timeout=10)[1] == []  # nobody measures on, unwatched
        assert done <= finished_items(out)
        done = set(finished_items(out))
        assert read_run(out).problems == ()
    for arguments in (("--resume", out), (*run, "--out", whole)):
        with harness(environment, *arguments) as process:
            stderr = "".join(lines_of(process))
        assert process.returncode == 0, stderr
    assert 0 < len(done) < len(read_manifest(whole)["plan"])
    assert read_manifest(out)["plan"] == read_manifest(whole)["plan"]
    assert outputs(out) == outputs(whole)


def outputs(directory: Path) -> list[tuple[str, str, list[int]]]:
    requests = read_run(directory).requests
    rows = zip(requests["item"], requests["request_id"], requests["output_ids"], strict=True)
    return sorted((item, request, list(ids)) for item, request, ids in rows)
