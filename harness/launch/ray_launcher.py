"""Fans the groups of a run out over the like nodes of a Ray cluster, and gathers what they store.

A group of comparable cells is measured on one node, alone, one group at a time. The groups of a
node that is lost go to the others; of what it had finished, whole blocks are kept, since the cells
of a block are compared with each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config import RunConfig
from harness.errors import HarnessError, WorkerError
from harness.launch.alike import refused_nodes, told
from harness.launch.launcher import Preparation, RunHost, groups
from harness.launch.node_agent import Ended
from harness.launch.orders import preparation_of, verification_of, worker_threads
from harness.launch.ray_cluster import Lost, Node, RayCluster
from harness.measure import GARBAGE_COLLECTION
from harness.parts import put_part
from harness.plan import WorkItem
from harness.preparation import Prepared
from harness.progress import Progress
from harness.resume import changes
from harness.supervisor import Call, pinned_environment
from harness.verification import Verification

Group = tuple[WorkItem, ...]


class RayLauncher:
    """See `harness.launch.launcher.Launcher`.

    Args:
        cluster: the connected cluster.
        machine: fingerprint of the machine that the run was made on so far; None for a new run.
    """

    def __init__(self, cluster: RayCluster, machine: Mapping[str, Any] | None) -> None:
        self._cluster = cluster
        self._machine = machine
        self._nodes: list[Node] = []
        self._refused: dict[str, str] = {}

    def prepare(self, config: RunConfig, progress: Progress) -> Preparation:
        """See `Launcher`; the run is prepared on every node that may measure it.

        Raises:
            HarnessError: as the first node raised it, when none could prepare the run.
        """
        self._nodes, self._refused = self._cluster.reserve(config)
        found = self._fingerprints()
        self._refuse(refused_nodes(found, config.require_accelerator, self._machine), progress)
        chosen = self._prepare_all(progress)
        progress.note(f"measuring on {', '.join(node.name for node in self._nodes)}")
        return chosen

    def measure(
        self, prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: RunHost
    ) -> None:
        """See `Launcher`."""
        wanted = {(item.repeat, item.cell.group) for item in items}
        whole = groups(prepared.workload().plan)
        waiting = deque(g for g in whole if (g[0].repeat, g[0].cell.group) in wanted)
        under_way: dict[Node, Group] = {}
        while waiting or under_way:
            for node in [node for node in self._nodes if node not in under_way]:
                self._begin_next(node, waiting, under_way, directory, host)
            if not under_way:
                break
            node, answer = self._cluster.next_answer()
            if isinstance(answer, Lost):
                self._lose(node, answer, host.note)
                waiting.appendleft(under_way.pop(node))
            elif isinstance(answer, Ended):
                group = under_way.pop(node)
                if answer.error is not None:
                    host.abandon(group, answer.error)
            else:
                if isinstance(answer, Call):
                    _keep(answer, node, directory, host)
                self._cluster.ask(node, "proceed")
        for group in waiting:
            host.abandon(group, WorkerError(f"no node is left ({self._why_none()})"))

    def verify(self, prepared: Prepared, directory: Path, progress: Progress) -> Verification:
        """See `Launcher`; on one node, on another when that is lost."""
        files = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
        while self._nodes:
            node = self._nodes[0]
            self._cluster.ask(node, "verify", files)
            answer = self._until_ended(node, progress)
            if isinstance(answer, Lost):
                self._lose(node, answer, progress.note)
            elif answer.error is not None:
                raise answer.error
            else:
                return verification_of(answer.result, prepared.config, directory)
        raise WorkerError(f"no node is left ({self._why_none()})")

    def record(self, config: RunConfig) -> dict[str, Any]:
        """See `Launcher`."""
        return {
            "isolated": True,
            "environment": pinned_environment(worker_threads(config)),
            "garbage_collection": GARBAGE_COLLECTION,
            "nodes": [node.name for node in self._nodes],
            "refused_nodes": dict(self._refused),  # so far: later losses are no refusals
        }

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        """Of every node that answers, in the order of the nodes."""
        found: dict[str, Any] = {}
        for node in self._nodes:
            self._cluster.ask(node, "fingerprint")
        for _ in tuple(self._nodes):
            node, answer = self._cluster.next_answer()
            if isinstance(answer, Lost):
                self._nodes.remove(node)
                self._refused[node.name] = answer.reason
            else:
                found[node.name] = answer
        return {node.name: found[node.name] for node in self._nodes}

    def _prepare_all(self, progress: Progress) -> Preparation:
        """Prepares the run on all nodes; those that would measure another run are refused."""
        results: dict[str, Any] = {}
        errors: dict[str, HarnessError] = {}
        for node in self._nodes:
            self._cluster.ask(node, "prepare")
        while len(results) + len(errors) < len(self._nodes):
            node, answer = self._cluster.next_answer()
            if isinstance(answer, Lost):
                errors[node.name] = WorkerError(answer.reason)
            elif isinstance(answer, Ended):
                if answer.error is not None:
                    errors[node.name] = answer.error
                else:
                    results[node.name] = answer.result
            else:
                if isinstance(answer, Call):
                    _tell(answer, node, progress)
                self._cluster.ask(node, "proceed")
        in_order = [results[node.name] for node in self._nodes if node.name in results]
        if not in_order:
            raise next(iter(errors.values()), None) or WorkerError(
                f"launcher: no node of the cluster can measure this run ({self._why_none()})"
            )
        chosen = preparation_of(in_order[0])
        reasons = {name: str(error) for name, error in errors.items()}
        then = _manifest(chosen)
        for name, result in results.items():
            if differing := changes(then, _manifest(preparation_of(result))):
                reasons[name] = told(differing)
        self._refuse(reasons, progress)
        return chosen

    def _until_ended(self, node: Node, progress: Progress) -> Ended | Lost:
        while True:
            _, answer = self._cluster.next_answer()
            if isinstance(answer, Ended | Lost):
                return answer
            if isinstance(answer, Call):
                _tell(answer, node, progress)
            self._cluster.ask(node, "proceed")

    def _begin_next(
        self,
        node: Node,
        waiting: deque[Group],
        under_way: dict[Node, Group],
        directory: Path,
        host: RunHost,
    ) -> None:
        """Gives a node the next group that has anything left, its begun blocks from their start."""
        while waiting:
            group = waiting.popleft()
            left = host.left(group)
            if not left:
                continue
            begun = {item.block for item in left}
            host.again([item for item in group if item.block in begun])
            host.note(f"{node.name}: measuring {group[0].cell.group.id}/r{group[0].repeat}")
            manifest = (directory / "manifest.json").read_bytes()
            self._cluster.ask(node, "measure", host.left(group), manifest)
            under_way[node] = group
            return

    def _lose(self, node: Node, lost: Lost, note: Callable[[str], None]) -> None:
        self._nodes.remove(node)
        self._refused[node.name] = lost.reason
        note(f"warning: node {node.name} was lost: {lost.reason}")

    def _refuse(self, reasons: Mapping[str, str], progress: Progress) -> None:
        """Leaves nodes out, and says which and why."""
        for node in [node for node in self._nodes if node.name in reasons]:
            self._nodes.remove(node)
            self._cluster.release(node)
        self._refused |= reasons
        for name, reason in reasons.items():
            progress.note(f"node {name} is left out: {reason}")

    def _why_none(self) -> str:
        reasons = (f"{name}: {reason}" for name, reason in self._refused.items())
        return "; ".join(reasons) or "none has CPUs to give"


def _keep(call: Call, node: Node, directory: Path, host: RunHost) -> None:
    """What a worker on a node says while it measures."""
    if call.method == "stored":
        item, files = call.arguments
        put_part(directory, item, files)
    elif call.method == "note":
        host.note(f"{node.name}: {call.arguments[0]}")
    else:
        getattr(host, call.method)(*call.arguments)


def _tell(call: Call, node: Node, progress: Progress) -> None:
    """What a worker on a node says while it prepares or verifies: first what it is about."""
    about, *more = call.arguments
    getattr(progress, call.method)(f"{node.name}: {about}", *more)


def _manifest(preparation: Preparation) -> dict[str, Any]:
    """What a manifest would say of it."""
    return {**preparation.identity, **preparation.prepared.record}
