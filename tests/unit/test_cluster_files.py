"""The files of docs/cluster.md name options that Ray and the harness really have."""

import shlex
import warnings
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from harness.cli import cli
from harness.config import load

ROOT = Path(__file__).parents[2]
FILES = ROOT / "configs" / "cluster"


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


@pytest.fixture
def ray_commands() -> Any:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.scripts import scripts
    return scripts.cli.commands


def test_the_slurm_script_calls_ray_and_the_harness_as_they_are(ray_commands: Any) -> None:
    text = (FILES / "slurm.sbatch").read_text().replace("\\\n", " ")
    words = shlex.split(text, comments=True)
    start = words.index("symmetric-run")
    assert words[start - 1] == "ray"
    end = words.index("--", start)
    asked = {word.partition("=")[0] for word in words[start:end] if word.startswith("--")}
    assert asked <= options(ray_commands["symmetric-run"]) | options(ray_commands["start"])
    assert words[end + 1 : end + 3] == ["harness", "run"]
    given = {"--config", "--launcher", "--out", "--resume"}
    assert given <= set(" ".join(words).replace("(", " ").split())
    assert given <= options(cli.commands["run"])


def test_the_ray_cluster_starts_ray_with_options_that_it_has(ray_commands: Any) -> None:
    spec = yaml.safe_load((FILES / "raycluster.yaml").read_text())["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= options(ray_commands["start"])
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={spec['rayVersion']}" in pinned


def test_the_commands_of_the_page_exist() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "harness run" in line and "`" not in line]
    asked = {word for line in lines for word in line.split("#")[0].split() if word[:2] == "--"}
    assert {"--launcher", "--require-accelerator", "--config", "--out"} <= asked
    assert asked - {"--"} <= options(cli.commands["run"])
    for name in ("reproduce", "paper-h100"):
        load(ROOT / "configs" / f"{name}.yaml", {"launcher": "ray"})
