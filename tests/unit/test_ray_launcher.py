"""Groups on the nodes of a cluster, as the launcher sees them: the cluster here is a script.

Three cells (AR, its control, SD) decode two blocks of two prompts: six items a group.
"""

import io
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

from fake_decoding import decode, one_token_rounds

from harness.errors import PlacementError
from harness.launch.node_agent import Ended
from harness.launch.ray_cluster import Lost, Node
from harness.launch.ray_launcher import RayLauncher
from harness.parts import part_files, write_part
from harness.plan import Cell, WorkItem, make_plan, with_control
from harness.progress import LineProgress
from harness.records import ItemResult
from harness.session import Session
from harness.store import RunStore, read_run
from harness.supervisor import Call

CELLS = with_control([Cell("ar", "mini", 0.0, 1), Cell("sd", "mini", 0.0, 1)])
PLAN = make_plan(CELLS, {"mini": 4}, block_size=2, repeats=2, seed=0)
LEFT, RIGHT = Node("left", None, None), Node("right", None, None)


class ScriptedCluster:
    """Nodes that take turns; each stores item after item until it has come to its end."""

    def __init__(self, folder: Path, ends: dict[tuple[Node, int], Any]) -> None:
        self.folder = folder
        self.ends = ends  # (node, items that it has stored) -> Lost or Ended
        self.stored = {LEFT: 0, RIGHT: 0}
        self.work: dict[Node, deque[Call]] = {}
        self.asked: deque[Node] = deque()

    def ask(self, node: Node, method: str, *arguments: Any) -> None:
        if method == "measure":
            self.work[node] = deque(
                call for item in arguments[0] for call in self.calls(node, item)
            )
        self.asked.append(node)

    def next_answer(self) -> tuple[Node, Any]:
        node = self.asked.popleft()
        if end := self.ends.pop((node, self.stored[node]), None):
            return node, end
        if not self.work[node]:
            return node, Ended()
        call = self.work[node].popleft()
        self.stored[node] += call.method == "ended"
        return node, call

    def calls(self, node: Node, item: WorkItem) -> list[Call]:
        write_part(self.folder, result(item, len(node.name)))  # the first token tells the node
        files = part_files(self.folder, item.id)
        return [Call("stored", (item.id, files)), Call("ended", (item.id, 2, 10))]


class Finished(NamedTuple):
    session: Session
    status: str
    node_of: dict[str, str]
    told: str


def result(item: WorkItem, first_token: int) -> ItemResult:
    output = {name: one_token_rounds(name, first_token, 9) for name in item.request_ids}
    return decode(item.cell, output, block=item.block, repeat=item.repeat)


def run(
    tmp_path: Path, ends: dict[tuple[Node, int], Any], before: Sequence[WorkItem] = ()
) -> Finished:
    store = RunStore.create(tmp_path / "run", {})
    for item in before:
        store.append_item(result(item, 0))
    launcher = RayLauncher(cast(Any, ScriptedCluster(tmp_path, ends)), None)
    launcher._nodes = [LEFT, RIGHT]
    prepared, told = mock.Mock(), io.StringIO()
    prepared.workload.return_value.plan = PLAN
    session = Session(prepared, store, LineProgress(told), launcher)
    status = session.run()
    rows = read_run(store.directory).requests
    nodes = {0: "before", 4: "left", 5: "right"}
    node_of = {
        item: nodes[ids[0]] for item, ids in zip(rows["item"], rows["output_ids"], strict=True)
    }
    return Finished(session, status, node_of, told.getvalue())


def blocks(node_of: dict[str, str], repeat: int) -> list[set[str]]:
    """Who measured the items of each block of a repeat."""
    return [{n for item, n in node_of.items() if f"/r{repeat}/k{b}" in item} for b in (0, 1)]


def test_each_group_is_measured_on_one_node(tmp_path: Path) -> None:
    done = run(tmp_path, {})
    assert done.status == "finished"
    assert blocks(done.node_of, 0) == [{"left"}, {"left"}]
    assert blocks(done.node_of, 1) == [{"right"}, {"right"}]
    assert done.node_of.keys() == {item.id for item in PLAN}


def test_of_a_lost_node_whole_blocks_are_kept_and_the_begun_one_is_measured_anew(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, {(RIGHT, 4): Lost("it burned")})  # one block of three, one item more
    assert done.status == "finished"
    assert blocks(done.node_of, 0) == [{"left"}, {"left"}]
    assert blocks(done.node_of, 1) == [{"right"}, {"left"}]
    assert "warning: node right was lost: it burned" in done.told
    assert "[13/13]" in done.told  # twelve items and one of them again


def test_without_a_node_the_rest_fails_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, {(LEFT, 3): Lost("flood"), (RIGHT, 0): Lost("fire")})
    assert done.status == "failed"
    assert blocks(done.node_of, 0) == [{"left"}, set()]
    assert blocks(done.node_of, 1) == [set(), set()]
    assert {failure.message for failure in done.session.failures.values()} == {
        "no node is left (right: fire; left: flood)"
    }


def test_a_group_that_fails_leaves_the_others(tmp_path: Path) -> None:
    failed = Ended(error=PlacementError("core 7: not ours"))
    done = run(tmp_path, {(RIGHT, 3): failed})
    assert done.status == "failed"
    assert blocks(done.node_of, 0) == [{"left"}, {"left"}]
    assert blocks(done.node_of, 1) == [{"right"}, set()]
    messages = {(f.error, f.message) for f in done.session.failures.values()}
    assert messages == {("PlacementError", "core 7: not ours")}
    assert {f.item for f in done.session.failures.values()} == {f"{c.id}/r1/k1" for c in CELLS}


def test_a_resumed_run_begins_its_begun_blocks_anew(tmp_path: Path) -> None:
    done = run(tmp_path, {}, before=PLAN[:4])  # one block of the first repeat and an item more
    assert done.status == "finished"
    assert blocks(done.node_of, 0) == [{"before"}, {"left"}]
    assert blocks(done.node_of, 1) == [{"right"}, {"right"}]
