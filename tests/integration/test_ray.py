"""`harness run --launcher ray` on a real cluster that the test starts: three nodes, one odd.

All nodes are on this machine, so they are alike unless an environment variable tells them apart.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.decoder import Placement
from harness.fingerprint import fingerprint, machine_differences
from harness.store import finished_items, read_manifest, read_run

HERE = Path(__file__).parent
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
# A dead node is noticed after two seconds, not half a minute.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
RUN = (
    *("--launcher", "ray", "--pair", "tiny", "--datasets", "mini", "--methods", "ar,slow"),
    *("--prompts", "8", "--block-size", "2", "--max-new-tokens", "12"),
    *("--repeats", "2", "--warmup-steps", "1", "--no-verify"),
)
GROUPS, BLOCKS = 2, 4  # repeats; blocks of two prompts
CELLS = 3  # AR, its control and `slow`

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process and of all nodes: with a method of our own, and a Ray folder of our own."""
    package = tmp_path_factory.mktemp("plugin") / "faulty-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[harness.decoders]\nslow = faulty_decoders:Slow\n")
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (package.parent, HERE))))
        patch.setenv("RAY_TMPDIR", short)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def cluster(environment: None) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        head = {**SMALL, "node_name": "left", "include_dashboard": False, "_system_config": QUICK}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            started.right = started.add_node(**SMALL, node_name="right")
            started.add_node(**SMALL, node_name="odd", env_vars={"OMP_DYNAMIC": "TRUE"})
            yield started
        finally:
            started.shutdown()


def harness(*arguments: str | Path, address: str | None = None) -> subprocess.Popen[str]:
    where = {} if address is None else {"RAY_ADDRESS": address}
    return subprocess.Popen(
        [sys.executable, "-c", "from harness.cli import main; main()", "run", *map(str, arguments)],
        env={**os.environ, **where},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def node_of(out: Path) -> dict[str, str | None]:
    """Finished item -> the node that measured it."""
    if not (out / "manifest.json").exists():
        return {}
    return {found.item: found.node for found in read_run(out).conditions}


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_blocks_on_one_node(out: Path) -> None:
    run = read_run(out)
    assert finished_items(out) == set(run.manifest["plan"])
    assert not run.requests.duplicated(["item", "request_id"]).any()
    nodes: dict[str, set[str | None]] = {}
    for item, node in node_of(out).items():
        nodes.setdefault(item.partition("/")[2], set()).add(node)  # all but the method
    assert len(nodes) == GROUPS * BLOCKS
    assert all(len(own) == 1 for own in nodes.values())


def test_a_lost_nodes_groups_are_measured_elsewhere_and_unlike_nodes_are_refused(
    cluster: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with harness(*RUN, "--out", out, address=cluster.address) as process:
        # One block is whole and another begun when the node dies.
        wait_until(lambda: [*node_of(out).values()].count("right") > CELLS, process)
        before = node_of(out)
        cluster.remove_node(cluster.right, allow_graceful=False)
        stderr = process.communicate(timeout=240)[1]
    assert process.returncode == 0, stderr
    assert "node odd is left out: it differs in environment.OMP_DYNAMIC: None and 'TRUE'" in stderr
    assert "warning: node right was lost" in stderr
    manifest = read_manifest(out)
    assert sorted(manifest["workers"]["nodes"]) == ["left", "right"]
    assert list(manifest["workers"]["refused_nodes"]) == ["odd"]
    assert machine_differences(manifest["fingerprint"], fingerprint(Placement())) == []
    assert manifest["greedy"]["compared"] == 2 * GROUPS * 8  # control and `slow`, prompts
    assert_blocks_on_one_node(out)
    kept = [item for item, node in node_of(out).items() if node == "right"]
    assert len(kept) >= CELLS
    assert set(node_of(out).values()) == {"left", "right"}
    assert {item for item in before if before[item] == "left"} <= {
        item for item, node in node_of(out).items() if node == "left"
    }


def test_a_killed_run_is_resumed_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with harness(*RUN, "--out", out, address=cluster.address) as process:
        wait_until(lambda: len(node_of(out)) > 2 * CELLS, process)
        process.kill()
    done = finished_items(out)
    assert len(done) < len(read_manifest(out)["plan"])
    with harness("--resume", out, address=cluster.address) as process:
        stderr = process.communicate(timeout=240)[1]
    assert process.returncode == 0, stderr
    assert_blocks_on_one_node(out)
    with harness("--resume", out, "--launcher", "local") as process:  # needs no cluster
        stderr = process.communicate(timeout=120)[1]
    assert (process.returncode, "nothing is left to measure" in stderr) == (0, True), stderr


def test_a_cluster_without_the_required_gpu_is_refused(cluster: Any, tmp_path: Path) -> None:
    asked = (*RUN, "--require-accelerator", "H100", "--out", tmp_path / "run")
    with harness(*asked, address=cluster.address) as process:
        stderr = process.communicate(timeout=120)[1]
    lines = stderr.splitlines()
    assert process.returncode == 1
    reason = "require_accelerator: H100 is not what it has (no GPU)"
    assert lines[-1].startswith("error: launcher: no node of the cluster can measure this run")
    assert all(f"{name}: {reason}" in lines[-1] for name in ("left", "right", "odd"))
    assert not (tmp_path / "run").exists()


def test_without_a_cluster_one_line_says_what_to_do(tmp_path: Path) -> None:
    with harness(*RUN, "--out", tmp_path / "run") as process:
        stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert stderr.splitlines() == [
        "error: launcher: no Ray cluster runs here; start one (docs/cluster.md) or set RAY_ADDRESS"
    ]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_answers_is_told_at_once(tmp_path: Path, scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with harness(*RUN, "--out", tmp_path / "run", address=address) as process:
            stderr = process.communicate(timeout=60)[1]  # Ray itself takes two minutes
    assert process.returncode == 2
    assert stderr.startswith(f"error: launcher: no Ray cluster answers at RAY_ADDRESS={address} (")
    assert stderr.count("\n") == 1
