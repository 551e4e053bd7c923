"""The kernel benchmarks run, and their JSON says what was timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reports.dashboard.site import build_site

BENCH = Path(__file__).parents[1] / "bench" / "test_kernels_bench.py"
KERNELS = {
    *("forward", "verification", "fan_out_closed_form", "fan_out_adaptive", "guesses"),
    *("cache_lookup", "channel_round_trip", "kv_gather"),
}


def test_the_json_of_the_kernel_benchmarks(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    quick = ("--benchmark-min-rounds=1", "--benchmark-max-time=0.001", "--benchmark-warmup=off")
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", *quick, str(BENCH)]
    done = subprocess.run(
        [*command, f"--benchmark-json={out}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["benchmarks"]
    assert {entry["name"].partition("[")[0].removeprefix("test_") for entry in found} == KERNELS
    assert all(entry["stats"]["min"] > 0 and entry["extra_info"] for entry in found)
    forward = {entry["extra_info"]["tokens"] for entry in found if "forward" in entry["name"]}
    assert forward == {1, 8, 24}

    site = build_site(tmp_path, tmp_path / "site")  # the dashboard reads the very same file
    (group,) = site.groups
    points = {each.series[0].setting: each.series[0].points for each in group.settings}
    medians = {entry["fullname"]: 1e3 * entry["stats"]["median"] for entry in found}
    assert {name: point.value for name, (point,) in points.items()} == pytest.approx(medians)
