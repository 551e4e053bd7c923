"""`.ci/benchmark`: what it decides of three measurements, with a stand-in for the harness."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "benchmark"
MAKEFILE = "venv:\n\tmkdir -p .venv/bin && cp harness .venv/bin/harness\n"
HARNESS = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1] == "compare":
    base, new = (json.load(open(folder + "/speed")) for folder in sys.argv[2:4])
    print(f"{base} to {new}")
    sys.exit(2 if 0 in (base, new) else new < 0.9 * base)
if sys.argv[1] == "run":
    out = sys.argv[sys.argv.index("--out") + 1]
    os.makedirs(out)
    name = os.path.basename(out).rsplit("-", 1)[1]
    print(json.loads(os.environ["SPEEDS"])[name], file=open(out + "/speed", "w"))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "benchmark")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "harness").write_text(HARNESS)
    (tmp_path / "harness").chmod(0o755)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run([*git, *command], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("base", "new", "again", "code", "told"),
    [
        (100, 98, 101, 0, "100 to 98"),
        (100, 80, 101, 1, "100 to 80"),
        (100, 100, 80, 0, "No verdict"),
        (100, 80, 80, 0, "No verdict"),
        (80, 80, 100, 0, "No verdict"),  # quicker than itself: it may hide that NEW is slower
        (100, 0, 100, 2, ""),
        (100, 100, 0, 2, ""),
    ],
)
def test_a_verdict_needs_a_base_that_is_as_quick_as_itself(
    repository: Path, base: int, new: int, again: int, code: int, told: str
) -> None:
    speeds = json.dumps({"base": base, "new": new, "again": again})
    done = subprocess.run(
        [str(repository / ".ci" / "benchmark"), "HEAD"],
        env={**os.environ, "SPEEDS": speeds},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    summary = (repository / "runs/ci/summary.md").read_text()
    assert told in summary
    assert ("No verdict" in told) == ("No verdict" in summary)
