"""Every worker has a deadline: one that says nothing is ended, whatever its task."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from harness import supervisor
from harness.config import RunConfig
from harness.errors import WorkerError
from harness.launch.local import FreshProcesses
from harness.preparation import prepare
from harness.progress import LineProgress
from harness.store import RunStore

CONFIG = RunConfig(pair="tiny", datasets=("mini",), prompts=1, worker_timeout_s=0.2)
PROGRESS = LineProgress(io.StringIO())


def measure(run: Path) -> None:
    prepared, host = prepare(CONFIG, PROGRESS), mock.Mock()
    host.left.side_effect = list
    RunStore.create(run, {})
    FreshProcesses().measure(prepared, prepared.workload().plan, run, host)
    raise host.abandon.call_args.args[1]


@pytest.mark.parametrize(
    "task",
    [
        lambda _: FreshProcesses().prepare(CONFIG, PROGRESS),
        measure,
        lambda run: FreshProcesses().verify(prepare(CONFIG, PROGRESS), run, PROGRESS),
    ],
    ids=["prepare", "measure", "verify"],
)
def test_a_silent_worker_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Callable[[Path], object]
) -> None:
    silent = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(supervisor, "COMMAND", silent)
    with pytest.raises(WorkerError, match=r"said nothing for 0\.2 s"):
        task(tmp_path)
