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
from harness.preparation import prepare
from harness.progress import LineProgress
from harness.tasks import FreshProcesses

CONFIG = RunConfig(pair="tiny", datasets=("mini",), prompts=1, worker_timeout_s=0.2)
PROGRESS = LineProgress(io.StringIO())


def measure(run: Path) -> None:
    prepared = prepare(CONFIG, PROGRESS)
    FreshProcesses().measure(prepared, prepared.workload().plan, run, mock.Mock())


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
