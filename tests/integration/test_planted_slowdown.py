"""A slowdown of 8% planted in a method's verification, found by `harness compare`; ten of ten.

The method is a plugin like anybody's: a package's metadata on the path, no part of the program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from harness.cli import main; main()"
RUN = ("run", "--pair", "tiny", "--datasets", "mini", "--prompts", "8", "--max-new-tokens", "24")
# No A/A control: AR's steps are not stretched, so it would tell of noise that `planted` has not.
ALONE = ("--methods", "planted", "--no-control", "--no-verify", "--set", "planted.step_ms=150")
GATE = "4%"  # half of what is planted: as far from the slowdown as from an unchanged rerun
TIMES = 10


class Harness:
    """The command line in a process of its own, with the plugin installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = folder / "plugin" / "planted-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
        points = "[harness.decoders]\nplanted = planted:PlantedDecoder\n"
        (metadata / "entry_points.txt").write_text(points)
        path = [str(metadata.parent), str(Path(__file__).parent), *sys.path]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MAIN, *map(str, arguments)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )

    def measure(self, name: str, slowdown: float) -> Path:
        out = self.folder / name
        done = self(*RUN, *ALONE, "--set", f"planted.slowdown={slowdown}", "--out", out)
        assert done.returncode == 0, done.stderr
        return out

    def gate(self, base: Path, new: Path) -> tuple[int, dict]:
        options = ("--fail-on-regression", GATE, "--format", "json")
        done = self("compare", base, new, *options)
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def base(harness: Harness) -> Path:
    return harness.measure("base", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("time", range(TIMES))
def test_an_unchanged_rerun_passes(harness: Harness, base: Path, time: int) -> None:
    code, found = harness.gate(base, harness.measure(f"again{time}", 0.0))
    print(told(found))  # noqa: T201
    assert code == 0, found


@pytest.mark.slow
@pytest.mark.parametrize("time", range(TIMES))
def test_a_planted_slowdown_is_caught(harness: Harness, base: Path, time: int) -> None:
    code, found = harness.gate(base, harness.measure(f"slower{time}", 0.08))
    print(told(found))  # noqa: T201
    assert code == 1, found
    (cell,) = found["cells"]
    assert cell["verdict"] == "regression"
    assert cell["factors"]["span"] == "verify"
    assert cell["factors"]["acceptance"] == 1.0  # greedy: the same tokens in the same rounds


def told(found: dict) -> str:
    """The one cell's speed over the base's, for the log."""
    (cell,) = found["cells"]
    return f"{cell['verdict']}: {cell['speed']}"
