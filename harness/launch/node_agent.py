"""One node of a cluster at work: starts fresh workers there and hands their calls on.

The launcher asks for one call after the other; asking for the next answers the one before, so a
worker waits until what it said is kept, as it does for a host on its own machine. Knows no Ray.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.conditions import watch
from harness.config import RunConfig
from harness.errors import HarnessError
from harness.launch.orders import (
    measure_order,
    prepare_order,
    verifier_threads,
    verify_order,
    worker_threads,
)
from harness.parts import part_files, part_items, remove_part
from harness.plan import WorkItem
from harness.preparation import Prepared, from_json
from harness.supervisor import Call, worker_calls

# Set by Ray in the processes that it starts, by what they reserved; not by the node's owner.
_RAYS_OWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_STARTED_WITH = Path("/proc/self/environ")

Calls = Generator[Call, None, Any]


@dataclass(frozen=True)
class Ended:
    """A task has ended: with a result, or with the error of ours that it raised."""

    result: Any = None
    error: HarnessError | None = None


class NodeAgent:
    """Does the tasks of a run on its node, one at a time.

    Args:
        name: of the node.
        folder: that relative paths of the run start from, where this node has it too.
        config: the run.
    """

    def __init__(self, name: str, folder: str, config: RunConfig) -> None:
        self._name = name
        self._config = config
        self._fingerprint: dict[str, Any] = {}
        self._prepared: Prepared | None = None
        self._calls: Calls | None = None
        with suppress(OSError):
            os.chdir(folder)
        _restore(os.environ, _STARTED_WITH.read_bytes())

    def fingerprint(self) -> dict[str, Any]:
        """What this machine is."""
        from harness.fingerprint import fingerprint

        self._fingerprint = fingerprint(self._config.placement)
        return self._fingerprint

    def prepare(self) -> None:
        """Begins to prepare the run on this node; its result is that of the worker."""
        self._begin(self._prepare())

    def measure(self, items: Sequence[WorkItem], manifest: bytes) -> None:
        """Begins to measure items of the run; its parts come with calls of `stored`."""
        self._begin(self._measure(items, manifest))

    def verify(self, files: Mapping[str, bytes]) -> None:
        """Begins to judge a run directory of these files."""
        self._begin(self._verify(files))

    def proceed(self) -> Call | Ended:
        """Answers the last call; the next one, or how the task has ended."""
        if self._calls is None:
            raise RuntimeError("no task has begun")
        try:
            return next(self._calls)
        except StopIteration as ended:
            return Ended(ended.value)
        except HarnessError as error:
            return Ended(error=error)

    def _begin(self, calls: Calls) -> None:
        self._calls = calls

    def _prepare(self) -> Calls:
        found = yield from self._work(prepare_order(self._config), threads=None)
        self._prepared = from_json(found["prepared"])
        return found

    def _measure(self, items: Sequence[WorkItem], manifest: bytes) -> Calls:
        own = watch(self._config.placement, self._fingerprint)
        with TemporaryDirectory(prefix="saguaro-") as folder:
            directory = Path(folder)
            (directory / "manifest.json").write_bytes(manifest)
            order = measure_order(self._run, items, directory)
            for call in self._work(order, threads=worker_threads(self._run.config)):
                item = call.arguments[0]
                if call.method == "measured" and (conditions := own.end(item)):
                    yield Call("observed", (replace(conditions, node=self._name),))
                if call.method == "ended" and item in part_items(directory):
                    yield Call("stored", (item, part_files(directory, item)))
                    remove_part(directory, item)
                yield call
                if call.method == "begin":
                    own.begin()

    def _verify(self, files: Mapping[str, bytes]) -> Calls:
        with TemporaryDirectory(prefix="saguaro-") as folder:
            directory = Path(folder)
            for name, content in files.items():
                (directory / name).write_bytes(content)
            order = verify_order(self._run, directory)
            return (yield from self._work(order, threads=verifier_threads(self._run.config)))

    def _work(self, order: Mapping[str, Any], threads: int | None) -> Calls:
        return worker_calls(order, threads=threads, timeout_s=self._config.worker_timeout_s)

    @property
    def _run(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("the run has not been prepared on this node")
        return self._prepared


def _restore(environment: Any, started_with: bytes) -> None:
    """Takes back what Ray has set since this process began, as in a shell on this node."""
    pairs = (entry.partition("=") for entry in started_with.decode().split("\0"))
    before = {name: value for name, _, value in pairs}
    for name in _RAYS_OWN:
        if name in before:
            environment[name] = before[name]
        else:
            environment.pop(name, None)
