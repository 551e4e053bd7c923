"""A Ray cluster as the launcher sees it: whole nodes, reserved, with an agent on each.

The only module that speaks to Ray. Each node is reserved by a placement group that takes all its
CPUs and GPUs, so that Ray runs nothing else there meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import RunConfig
from harness.errors import UsageError
from harness.launch.node_agent import Ended, NodeAgent
from harness.supervisor import Call

_RESERVE_S = 60.0  # for the nodes' other Ray work to end
_ANSWER_S = 5.0  # for a cluster's port to take a connection


@dataclass(frozen=True, eq=False)
class Node:
    """A reserved node.

    Attributes:
        name: as Ray calls it; with the start of its id where several are called so.
        agent: handle of its `NodeAgent`.
        placement_group: what reserves it.
    """

    name: str
    agent: Any
    placement_group: Any


@dataclass(frozen=True)
class Lost:
    """A node can no longer be reached."""

    reason: str


@contextmanager
def connected() -> Iterator[RayCluster]:
    """The cluster that `RAY_ADDRESS` names or that runs on this machine.

    Raises:
        UsageError: Ray is not installed, or no cluster runs, or none where `RAY_ADDRESS` says.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            "launcher: ray needs Ray, which is not installed: pip install saguaro-harness[ray]"
        ) from error
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise UsageError(
            "launcher: no Ray cluster runs here; start one (docs/cluster.md) or set RAY_ADDRESS"
        ) from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()  # ends the agents and with them the workers


def _check_address(address: str) -> None:
    """Refuses an address where nobody answers; Ray itself would end this process after minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():  # `auto`, or nothing: Ray looks on this machine
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"launcher: no Ray cluster answers at RAY_ADDRESS={address} ({error}); correct it or "
            "unset it"
        ) from error


class RayCluster:
    """The nodes of the connected cluster and the calls under way on them."""

    def __init__(self) -> None:
        self._answers: dict[Any, Node] = {}  # an answer to come -> who gives it

    def reserve(self, config: RunConfig) -> tuple[list[Node], dict[str, str]]:
        """Reserves every living node that has CPUs.

        Returns:
            The nodes, and by name why another could not be had.
        """
        from ray.util.placement_group import remove_placement_group

        wanted = {name: (own, _reserved(own)) for name, own in _living_nodes().items()}
        nodes, refused = [], {}
        left_s = _RESERVE_S
        for name, (own, group) in wanted.items():
            if group.wait(left_s):
                nodes.append(Node(name, _agent(name, own, group, config), group))
            else:
                left_s = 0.1  # the others have had as much time
                remove_placement_group(group)
                refused[name] = f"other Ray work held it for {_RESERVE_S:g} s"
        return nodes, refused

    def release(self, node: Node) -> None:
        """Ends the agent of a node and gives its CPUs and GPUs back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        ray.kill(node.agent)
        remove_placement_group(node.placement_group)

    def ask(self, node: Node, method: str, *arguments: Any) -> None:
        """Calls a method of the node's agent; `next_answer` gives what it returned."""
        self._answers[getattr(node.agent, method).remote(*arguments)] = node

    def next_answer(self) -> tuple[Node, Call | Ended | dict[str, Any] | Lost | None]:
        """The answer that comes first, of all nodes; waits for it.

        Raises:
            RuntimeError: no node was asked anything.
            ray.exceptions.RayTaskError: a bug in an agent, as it raised it.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not self._answers:
            raise RuntimeError("no node was asked anything")
        (ready, *_), _ = ray.wait(list(self._answers), num_returns=1)
        node = self._answers.pop(ready)
        try:
            return node, ray.get(ready)
        except RayTaskError:
            raise
        except RayError as error:
            self.release(node)
            return node, Lost(_last_line(error))


def _living_nodes() -> dict[str, dict[str, Any]]:
    """Name -> what Ray knows of a node, where it is alive and has CPUs to give."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    uses = Counter(node["NodeName"] for node in alive)
    return {
        node["NodeName"] if uses[node["NodeName"]] == 1 else _numbered(node): node for node in alive
    }


def _numbered(node: dict[str, Any]) -> str:
    return f"{node['NodeName']}-{node['NodeID'][:8]}"


def _devices(node: dict[str, Any]) -> dict[str, float]:
    return {name: node["Resources"][name] for name in ("CPU", "GPU") if node["Resources"].get(name)}


def _reserved(node: dict[str, Any]) -> Any:
    """A placement group of all CPUs and GPUs of a node, as soon as they are free."""
    from ray.util.placement_group import placement_group

    return placement_group(
        [_devices(node)],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"ray.io/node-id": node["NodeID"]}],
    )


def _agent(name: str, node: dict[str, Any], group: Any, config: RunConfig) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    devices = _devices(node)
    placed = ray.remote(NodeAgent).options(
        num_cpus=devices["CPU"],
        num_gpus=devices.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
    )
    return placed.remote(name, str(Path.cwd()), config)


def _last_line(error: Exception) -> str:
    """Where Ray tells why an actor is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
