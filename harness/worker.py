"""A fresh process for one task of a run: preparing it, measuring a group of cells, verifying.

Started by `harness.supervisor` as `python -m harness.worker`. JSON lines over two pipes: one order
comes in; calls of the host's methods go out, each answered before the worker goes on; last comes a
result or an error. Nothing but this protocol reaches its standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from harness.config import RunConfig
from harness.errors import HarnessError
from harness.execution import execute
from harness.launch.local import InProcess
from harness.messages import first_line
from harness.preparation import from_json, to_json

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class RemoteHost:
    """The methods of `harness.execution.Host` and `Progress`, called in the process above."""

    def __init__(self, answers: TextIO, calls: TextIO) -> None:
        self._answers = answers
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            self.send({"call": name, "arguments": arguments})
            if not self._answers.readline():
                raise SystemExit(1)  # the process above is gone: nobody is left to tell

        return call

    def send(self, message: Mapping[str, Any]) -> None:
        """One line; infinite numbers and NaN are kept."""
        self._calls.write(json.dumps(message) + "\n")
        self._calls.flush()


def prepare(order: Mapping[str, Any], host: Any) -> dict[str, Any]:
    """Checks and prepares a run: `prepared` and the `identity` of program and machine."""
    found = InProcess().prepare(RunConfig.model_validate(order["config"]), host)
    return {"prepared": to_json(found.prepared), "identity": found.identity}


def measure(order: Mapping[str, Any], host: Any) -> None:
    """Measures items of a run, stores each as a part."""
    prepared = from_json(order["prepared"])
    wanted = set(order["items"])
    items = [item for item in prepared.workload().plan if item.id in wanted]
    execute(prepared, items, Path(order["directory"]), host)


def verify(order: Mapping[str, Any], host: Any) -> dict[str, Any]:
    """Judges every output of a stored run; what the manifest keeps."""
    prepared = from_json(order["prepared"])
    return InProcess().verify(prepared, Path(order["directory"]), host).record()


TASKS = {"prepare": prepare, "measure": measure, "verify": verify}


def main() -> None:
    """Does one task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the process above's to handle
    host = _connect()
    order = json.loads(sys.stdin.readline())
    _die_with(order["parent"])
    try:
        host.send({"result": TASKS[order["task"]](order, host)})
    except Exception as error:  # noqa: BLE001 - told to the process above
        trace = None if isinstance(error, HarnessError) else traceback.format_exc()
        told = {"type": type(error).__name__, "message": first_line(error), "trace": trace}
        host.send({"error": told})


def _connect() -> RemoteHost:
    """Takes standard output for the protocol; what anything else prints goes to standard error."""
    calls = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return RemoteHost(sys.stdin, calls)


def _die_with(parent: int) -> None:
    """Ends this process when the one above is killed, so that nothing is measured unwatched."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
