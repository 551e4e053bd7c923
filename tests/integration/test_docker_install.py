"""The `pip` lines of the container recipes, resolved in a clean environment of their Python.

Downloads what the images would (a few GB for CUDA) and installs nothing. Compiling flash-attn needs
CUDA's compiler: a stand-in with its version and requirements takes its place.
"""

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = "python3.12"  # of both images

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("venv")
    found = subprocess.run([PYTHON, "--version"], capture_output=True, check=False)
    python = PYTHON if found.returncode == 0 else sys.executable
    subprocess.run([python, "-m", "venv", folder], check=True)
    return [str(folder / "bin" / "python"), "-m", "pip"]


def flash_attn(folder: Path) -> Path:
    """A wheel of nothing, with the name, version and requirements of the pinned flash-attn."""
    pinned = re.search(r"^flash-attn==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    info = f"flash_attn-{pinned[1]}.dist-info"
    with zipfile.ZipFile(folder / f"flash_attn-{pinned[1]}-py3-none-any.whl", "w") as wheel:
        head = f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {pinned[1]}\n"
        wheel.writestr(f"{info}/METADATA", head + "Requires-Dist: torch\nRequires-Dist: einops\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_install_step_resolves(device: str, pip: list[str], tmp_path: Path) -> None:
    wheels = flash_attn(tmp_path)
    recipe = (ROOT / "docker" / f"{device}.Dockerfile").read_text()
    steps = re.findall(r"^RUN pip install (.*)$", recipe, re.MULTILINE)
    assert len(steps) == {"cpu": 2, "cuda": 3}[device]
    for step in steps:
        words = shlex.split(step.replace("/home/harness/wheels", str(wheels)))
        done = subprocess.run(
            [*pip, "install", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{step}\n{done.stderr[-2000:]}"
        print(step, "->", done.stdout.splitlines()[-1][:400])  # noqa: T201 - the report of this test
