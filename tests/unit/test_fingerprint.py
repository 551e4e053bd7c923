import json
import os
import subprocess

import pytest

from harness import fingerprint as module
from harness.decoder import Placement
from harness.fingerprint import differences, fingerprint, git_state, package_versions


@pytest.fixture(scope="module")
def here():
    return fingerprint(Placement(target_cores=(0,), draft_cores=(0,)))


def test_fingerprint_is_strict_json_and_says_what_this_machine_is(here):
    assert json.loads(json.dumps(here, allow_nan=False)) == here
    assert here["cpu"]["cores_available"] == len(os.sched_getaffinity(0))
    assert here["memory_bytes"] > 2**28
    assert here["placement"] == {
        "target_cores": [0],
        "draft_cores": [0],
        "shared": True,
        "convention": "equal-target",
    }
    # some builds carry "+cu130" in the module and not in the package
    assert here["torch"]["version"].split("+")[0] == package_versions()["torch"].split("+")[0]


def test_differences_name_the_fields_of_identity(here):
    other = json.loads(json.dumps(here))
    other["load_average"] = 99.0
    other["cpu"]["frequency_mhz"] = 1.0
    other["environment"]["HARNESS_CACHE_DIR"] = "/elsewhere"
    assert differences(here, other) == []
    other["cpu"]["model"] = "Z80"
    other["environment"]["OMP_PROC_BIND"] = "true"
    assert differences(here, other) == [
        f"cpu.model: {here['cpu']['model']!r} and 'Z80'",
        "environment.OMP_PROC_BIND: None and 'true'",
    ]


def test_cpu_info_is_that_of_the_first_processor():
    text = "processor\t: 0\nmodel name\t: Fast CPU: v2\nflags\t: fpu avx2\n\nmodel name\t: Other\n"
    assert module._cpu_info(text)["model name"] == "Fast CPU: v2"
    assert module._cpu_info("") == {}


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), (None, None)],
)
def test_quota_of_a_container_is_in_cores(cpu_max, cores):
    assert module._quota(cpu_max) == cores


def test_environment_keeps_what_matters_and_no_secret():
    variables = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "HARNESS_DATA_DIR": "/data",
        "HARNESS_API_KEY": "secret",
        "HOME": "/home/me",
    }
    kept = ["CUDA_VISIBLE_DEVICES", "HARNESS_DATA_DIR", "OMP_NUM_THREADS"]
    assert list(module._environment(variables)) == kept


def git(root, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_that_of_the_repository_at_root(tmp_path):
    git(tmp_path, "init")
    assert git_state(tmp_path) == (None, None)  # no commit yet
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (revision, False)
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == (revision, True)
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_state(inside) == (None, None)  # somebody else's repository


def test_git_state_without_git_or_repository(tmp_path, monkeypatch):
    assert git_state(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == (None, None)
