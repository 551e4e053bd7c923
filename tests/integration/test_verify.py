"""`harness verify` and the certificate of `harness run`, on the tiny pair from the command line."""

import importlib.metadata
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baselines.sd import SpeculativeDecoder
from harness import registry
from harness.cli import cli
from harness.store import read_manifest
from impl.engine import sampling

TINY = ("--pair", "tiny", "--datasets", "mini", "--prompts", "8", "--max-new-tokens", "48")

RUN = ("run", "--no-isolate", *TINY)


def likely_enough(uniform: float, p: float, q: float) -> bool:
    """In place of the rule that keeps the distribution."""
    return p > 0.3


class TypicalAcceptance(SpeculativeDecoder):
    """Accepts what the target finds likely enough."""

    name = "typical"

    def step(self):  # type: ignore[no-untyped-def]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "accepts", likely_enough)
            return super().step()


@pytest.fixture(autouse=True)
def _one_broken_method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    broken = importlib.metadata.EntryPoint(
        TypicalAcceptance.name, f"{__name__}:TypicalAcceptance", registry.GROUP
    )
    installed = importlib.metadata.entry_points(group=registry.GROUP)
    points = importlib.metadata.EntryPoints([*installed, broken])
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def harness(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def cells(directory: Path) -> dict[tuple[str, float], bool | None]:
    shown = json.loads(harness("show", directory, "--json").stdout)
    return {(c["method"], c["temperature"]): c["verified"] for c in shown["cells"]}


def test_a_run_certifies_its_methods_and_verify_does_so_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grid = (
        "--warmup-steps",
        "2",
        "--methods",
        "ar,sd,typical",
        "--temperatures",
        "1",
        "--repeats",
        "2",
    )
    result = harness(*RUN, *grid, "--out", out)
    assert result.exit_code == 0, result.output
    assert cells(out) == {
        ("ar", 1): True,
        ("sd", 1): True,
        ("typical", 1): False,
    }
    assert " NO " in result.stdout
    outputs = 3 * 2 * 8  # methods, repeats, prompts
    assert f"outputs: {outputs} of {outputs}" in result.stderr
    certificate = read_manifest(out)["certificate"]
    again = harness("verify", out)
    assert again.exit_code == 1
    assert read_manifest(out)["certificate"] == certificate  # to the last digit
    (line,) = (row for row in again.stdout.splitlines() if row.startswith("fail"))
    assert line.startswith("fail  typical, temperature 1, batch size 1: ")
    verdicts = certificate["verdicts"]
    (case,) = (v["reproducer"] for v in verdicts if v["reproducer"])
    assert f"request {case['request_id']} " in again.stdout
    assert f"round {case['round']}, output position {case['position']}" in again.stdout

    # the command that it names decodes the same tokens and fails alike
    replay = shlex.split(case["command"])
    assert replay[:2] == ["harness", "verify"]
    replayed = harness(*replay[1:], "--out", tmp_path / "replayed", "--json")
    assert replayed.exit_code == 1
    found = {v["method"]: v for v in json.loads(replayed.stdout)["verdicts"]}
    (failed,) = (v for v in verdicts if v["status"] == "fail")
    assert found["typical"]["reproducer"]["request_id"] == case["request_id"]
    statistics = [
        {(t["test"], t["stratum"]): t["statistic"] for t in v["tests"]}
        for v in (failed, found["typical"])
    ]
    assert statistics[0] == statistics[1]


def test_at_temperature_0_equal_outputs_certify(tmp_path: Path) -> None:
    few = ("--prompts", "2", "--max-new-tokens", "8", "--warmup-steps", "2")
    result = harness(
        "run", "--no-isolate", *TINY, *few, "--methods", "ar,typical", "--out", tmp_path / "run"
    )
    assert result.exit_code == 0, result.output
    # there typical acceptance is no fault: the tiny target is not sampled
    assert cells(tmp_path / "run") == {("ar", 0): True, ("typical", 0): True}


def test_without_verifying_every_figure_is_marked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = harness(
        "run", "--no-isolate", *TINY, "--methods", "ar", "--no-verify", "--no-control", "--out", out
    )
    assert result.exit_code == 0, result.output
    assert cells(out) == {("ar", 0): None}
    assert "unverified" in result.stdout
    assert "losslessness: unverified" in result.stdout


def test_exact_methods_pass_under_the_transformers_model_as_well(tmp_path: Path) -> None:
    arguments = (
        "--methods",
        "sd",
        "--temperatures",
        "1",
        "--tokens",
        "900",
        "--out",
        tmp_path / "r",
    )
    result = harness("verify", *TINY, *arguments, "--reference", "transformers-fp32", "--json")
    assert result.exit_code == 0, result.output
    certificate = json.loads(result.stdout)
    assert certificate["reference"] == "transformers-fp32"
    assert not certificate["exact_reference"]
    verdicts = {v["method"]: v for v in certificate["verdicts"]}
    assert verdicts.keys() == {"ar", "sd"}  # the baseline is added: it is the reference's control
    assert all(v["tokens"] >= 900 for v in verdicts.values())
    assert verdicts["sd"]["outputs"] == verdicts["ar"]["outputs"]
    assert verdicts["sd"]["outputs"] % 8 == 0  # whole repeats of all prompts
    assert verdicts["sd"]["status"] != "fail"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--methods", "sd"), "--methods: has no place beside a stored run; drop one of them"),
        (("--tokens", "9"), "--tokens: has no place beside a stored run; drop one of them"),
        (("--against", "{run}"), "--against: both runs have the same seed"),
    ],
)
def test_a_usage_error_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    out = tmp_path / "run"
    few = ("--prompts", "1", "--max-new-tokens", "4", "--warmup-steps", "1")
    harness(
        "run",
        "--no-isolate",
        *TINY,
        "--methods",
        "ar",
        *few,
        "--no-verify",
        "--no-control",
        "--out",
        out,
    )
    result = harness("verify", out, *(argument.format(run=out) for argument in arguments))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {line}")


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = harness("verify", tmp_path)
    assert result.exit_code == 1
    assert "is no run directory" in result.stderr.splitlines()[-1]


def test_a_changed_prompt_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "One."}\n{"prompt": "Two."}\n', encoding="utf-8")
    out, few = tmp_path / "run", ("--max-new-tokens", "4", "--no-verify", "--no-control")
    arguments = ("--pair", "tiny", "--datasets", file, "--methods", "ar", "--warmup-steps", "1")
    result = harness("run", "--no-isolate", *arguments, *few, "--out", out)
    assert result.exit_code == 0, result.output
    file.write_text('{"prompt": "One!"}\n{"prompt": "Two."}\n', encoding="utf-8")
    result = harness("verify", out)
    assert result.exit_code == 1
    assert "few is no longer what the run was made with" in result.stderr
