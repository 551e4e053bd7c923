"""`harness run --resume`: killed at any moment, continued without measuring anything twice.

The runs are of decoders with fixed output (`test_run`), so that what must be there is known.
"""

import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from full_disk import full_beyond
from test_run import RUN, Counting, _fixed_decoders, entry_points_of, harness

from harness import registry
from harness.cli import cli
from harness.decoder import Round
from harness.store import finished_items, read_manifest, read_run

GRID = ("--methods", "ar", "--temperatures", "0,1", "--block-size", "2", "--no-verify")
MAIN = "from harness.cli import main; main()"
ITEMS = 2 * 2 * 2  # temperatures, AR and its control, blocks of two of the four prompts
SLOW_IMPORTS = (
    *(
        "torch",
        "transformers.tokenization_utils_tokenizers",
        "pyarrow.parquet",
        "pandas",
        "scipy.stats",
    ),
    *("harness.verification", "harness.runner", "harness.summary", "impl.engine.models"),
)
_ = _fixed_decoders  # a fixture, for every test here too


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed (as by SIGKILL: nothing was tidied) while its fourth item ran."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("harness.execution.run_item", killed_at(4))
        with pytest.raises(Killed):
            harness(*RUN, *GRID, "--out", out)
    assert len(finished_items(out)) == 3
    assert read_manifest(out)["status"] == "running"
    Counting.alive.clear()  # they ended with their process
    return out


class Slow(Counting):
    """Gives a signal time to arrive."""

    def step(self) -> list[Round]:
        time.sleep(0.005)
        return super().step()


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at(number: int):  # type: ignore[no-untyped-def]
    from harness.measure import run_item

    calls = iter(range(1, 1000))

    def measure(*arguments, **limits):  # type: ignore[no-untyped-def]
        if next(calls) == number:
            raise Killed
        return run_item(*arguments, **limits)

    return measure


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the items that are measured from now on."""
    from harness.measure import run_item

    measured = []

    def measure(decoder, item, *arguments, **limits):  # type: ignore[no-untyped-def]
        measured.append(item.id)
        return run_item(decoder, item, *arguments, **limits)

    monkeypatch.setattr("harness.execution.run_item", measure)
    return measured


def assert_whole(out: Path) -> None:
    """Every item once, every prompt of every cell once, every output as it must be."""
    run = read_run(out)
    assert run.manifest["status"] == "finished"
    assert run.problems == ()
    assert finished_items(out) == set(run.manifest["plan"])
    assert len(run.requests) == 2 * 2 * 4
    assert not run.requests.duplicated(["item", "request_id"]).any()
    assert all(list(ids) == [0, 1, 2, 3, 4, 5] for ids in run.requests["output_ids"])
    assert len(run.rounds) == 2 * 2 * 4 * 6


def test_only_what_is_missing_is_measured(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, done = read_manifest(half), finished_items(half)
    measured = counted(monkeypatch)
    result = harness("run", "--resume", half)
    assert result.exit_code == 0, result.output
    assert measured == before["plan"][3:]
    assert not done & set(measured)
    assert read_manifest(half)["plan"] == before["plan"]
    assert read_manifest(half)["created"] == before["created"]
    assert_whole(half)
    assert not Counting.alive


def test_a_finished_run_is_shown_again_and_nothing_is_measured(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness("run", "--resume", half)
    before = (half / "manifest.json").read_text()
    measured = counted(monkeypatch)
    result = harness("run", "--resume", half)
    assert result.exit_code == 0, result.output
    assert "nothing is left to measure" in result.stderr
    assert measured == []
    assert (half / "manifest.json").read_text() == before


def test_a_run_killed_while_it_was_verified_is_only_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_arguments: object) -> None:
        raise Killed

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("harness.launch.local.verify_outputs", killed)
        with pytest.raises(Killed):
            harness(*RUN, "--methods", "ar", "--out", out)
    assert "greedy" not in read_manifest(out)
    measured = counted(monkeypatch)
    result = harness("run", "--resume", out)
    assert result.exit_code == 0, result.output
    assert measured == []
    assert read_manifest(out)["greedy"]["compared"] == 4
    (verdict,) = read_manifest(out)["certificate"]["verdicts"]
    assert verdict["greedy"]["compared"] == 4  # its control's


def test_a_failed_cell_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Counting, "step", lambda _: 1 // 0)
        assert harness(*RUN, *GRID, "--out", out).exit_code == 1
    assert read_manifest(out)["status"] == "failed"
    assert harness("run", "--resume", out).exit_code == 0
    assert read_manifest(out)["failures"] == []
    assert_whole(out)


def test_a_damaged_part_is_named_and_measured_again(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sorted(half.rglob("parts/**/rounds.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:60])
    measured = counted(monkeypatch)
    result = harness("run", "--resume", half)
    assert result.exit_code == 0, result.output
    assert f"{damaged}: cannot be read" in result.stderr
    assert damaged.parent.relative_to(half / "parts").as_posix() in measured
    assert len(measured) == ITEMS - 2
    assert_whole(half)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--seed", "7"), "config.seed: 0 and 7"),
        (("--prompts", "3"), "config.prompts: 4 and 3"),
        (("--set", "ar.x=1"), None),
        (("--temperatures", "0"), "config.temperatures: [0.0, 1.0] and [0.0]"),
    ],
)
def test_another_config_is_refused_with_the_fields_that_differ(
    half: Path, options: tuple[str, ...], field: str | None
) -> None:
    before = (half / "manifest.json").read_bytes()
    result = harness(*RUN, *GRID, *options, "--resume", half)
    if field is None:  # the option does not exist at all
        assert result.exit_code == 2
    else:
        assert result.exit_code == 1
        assert f"error: {half}: cannot be continued" in result.stderr
        assert field in result.stderr
    assert (half / "manifest.json").read_bytes() == before


def test_the_same_options_beside_resume_are_fine(half: Path) -> None:
    result = harness(*RUN, *GRID, "--resume", half)
    assert result.exit_code == 0, result.output
    assert_whole(half)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("git", "revision"), "0" * 40),
        (("fingerprint", "cpu", "model"), "Z80"),
        (("fingerprint", "torch", "version"), "1.0"),
        (("pair", "target", "sha256"), "0" * 64),
        (("datasets", "mini", "sha256"), "0" * 64),
        (("plan",), ["ar/mini/t0/b1/r0/k0"]),
    ],
)
def test_another_revision_machine_or_input_is_refused(
    half: Path, path: tuple[str, ...], value: object
) -> None:
    manifest = read_manifest(half)
    place = manifest
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (half / "manifest.json").write_text(json.dumps(manifest))
    result = harness("run", "--resume", half)
    assert result.exit_code == 1
    assert ".".join(path) in result.stderr
    assert len(finished_items(half)) == 3


def test_what_weights_and_prompts_were_read_from_does_not_matter(half: Path) -> None:
    manifest = read_manifest(half)
    manifest["pair"]["target"]["source"] = "another mirror"
    manifest["config"]["cache_dir"] = None
    (half / "manifest.json").write_text(json.dumps(manifest))
    assert harness("run", "--resume", half).exit_code == 0


def test_how_long_a_worker_may_be_silent_does_not_matter(half: Path) -> None:
    manifest = read_manifest(half)
    manifest["config"]["worker_timeout_s"] = 5.0
    (half / "manifest.json").write_text(json.dumps(manifest))
    assert harness(*RUN, *GRID, "--resume", half).exit_code == 0


def test_no_run_directory_and_a_second_out_are_refused(tmp_path: Path, half: Path) -> None:
    result = harness("run", "--resume", tmp_path / "nothing")
    assert result.exit_code == 1
    assert "is no run directory" in result.stderr
    result = harness("run", "--resume", half, "--out", tmp_path / "other")
    assert (result.exit_code, "--out: has no place beside --resume" in result.stderr) == (2, True)


def test_a_run_that_another_process_writes_is_refused(half: Path) -> None:
    from harness.store import RunStore

    with RunStore.open(half).locked():
        result = harness("run", "--resume", half)
    assert result.exit_code == 1
    assert "another process is writing this run" in result.stderr
    assert harness("run", "--resume", half).exit_code == 0


def test_a_read_only_directory_is_named_and_keeps_its_finished_items(half: Path) -> None:
    done, folders = finished_items(half), [half, *(p for p in half.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    result = subprocess.run(
        [sys.executable, "-c", MAIN, "run", "--resume", str(half)],
        preexec_fn=obey_mode_bits,
        capture_output=True,
        text=True,
        check=False,
    )
    for folder in folders:
        folder.chmod(0o755)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert re.fullmatch(rf"error: {half}/\S+: Permission denied", error)
    assert read_run(half).problems == ()
    assert finished_items(half) == done
    assert harness("run", "--resume", half).exit_code == 0
    assert_whole(half)


@pytest.mark.parametrize("room", [0, 3000])  # for not even a line; for lines, but no item's rows
def test_a_disk_that_fills_is_named_and_the_run_goes_on_when_there_is_room(
    half: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    from harness.measure import run_item

    calls = iter(range(1, ITEMS))
    done = finished_items(half)
    with ExitStack() as full, monkeypatch.context() as patch:

        def measure(*arguments, **limits):  # type: ignore[no-untyped-def]
            if next(calls) == 2:
                full.enter_context(full_beyond(room))
            return run_item(*arguments, **limits)

        patch.setattr("harness.execution.run_item", measure)
        result = harness("run", "--resume", half)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: {half}: File too large"
    assert done < finished_items(half)
    assert len(finished_items(half) - done) == 1
    assert read_run(half).problems == ()
    assert harness("run", "--resume", half).exit_code == 0
    assert_whole(half)


def obey_mode_bits() -> None:
    """Takes root's leave to write everywhere from the program that is about to start."""
    if os.geteuid() == 0:
        cap_dac_override, drop_from_bounding_set = 1, 24
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, cap_dac_override, 0, 0, 0) == 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Killed from the first moment of a run to its last; seeded, so that a failure comes again."""
    moments, out = random.Random(20261129), tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # 3.11 preloads by this path only
    fork_server = multiprocessing.get_context("forkserver")
    fork_server.set_forkserver_preload([*SLOW_IMPORTS, __name__])
    begin = time.monotonic()
    finish(fork_server.Process(target=run_slowly, args=(tmp_path / "whole",)))
    whole_s = time.monotonic() - begin
    done: set[str] = set()
    for _ in range(kills):
        process = fork_server.Process(target=run_slowly, args=(out,))
        process.start()
        process.join(moments.uniform(0, whole_s))
        process.kill()
        process.join()
        if (out / "manifest.json").exists():
            stored = finished_items(out)
            assert done <= stored  # nothing that was finished is lost
            assert read_run(out).problems == ()
            done = set(stored)
        if len(done) == ITEMS:  # it has come to its end: begin another
            assert_whole_after_resume(out, done)
            shutil.rmtree(out)
            done = set()
    finish(fork_server.Process(target=run_slowly, args=(out,)))
    assert_whole(out)


def assert_whole_after_resume(out: Path, done: set[str]) -> None:
    """Killed after its last item, a run is still ended in order by the next."""
    result = harness("run", "--resume", out)
    assert result.exit_code == 0, result.output
    assert finished_items(out) == done
    assert_whole(out)


def finish(process: multiprocessing.process.BaseProcess) -> None:
    process.start()
    process.join()
    assert process.exitcode == 0


def run_slowly(out: Path) -> None:
    """In a process of its own: begins or continues a run whose steps take 5 ms each."""
    points = entry_points_of(Slow)
    registry.entry_points = lambda group: points.select(group=group)  # type: ignore[assignment]
    begun = (out / "manifest.json").exists()
    where = ("--resume", str(out)) if begun else ("--out", str(out))
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    cli.main([*RUN, *GRID, *where])
