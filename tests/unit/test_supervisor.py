"""A worker's calls, results and every way in which it can end; the workers are scripts here."""

import sys
import time
from typing import Any

import psutil
import pytest

from harness import supervisor
from harness.errors import StoreError, UsageError, WorkerError
from harness.supervisor import call_worker

HEADER = """
import json, os, signal, sys, time
order = json.loads(sys.stdin.readline())
def say(**message):
    print(json.dumps(message), flush=True)
def call(name, *arguments):
    say(call=name, arguments=arguments)
    sys.stdin.readline()
"""


class Host:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def note(self, *arguments: Any) -> None:
        self.heard.append(arguments)


def result_of(monkeypatch: pytest.MonkeyPatch, script: str, host: Any = None, **how: Any) -> Any:
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", HEADER + script))
    how = {"threads": 1, "timeout_s": 30.0} | how
    return call_worker({"task": "add", "numbers": [1, 2]}, host or Host(), **how)


def test_calls_are_answered_before_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowHost(Host):
        def note(self, *arguments: Any) -> None:
            time.sleep(0.05)
            super().note(*arguments, time.monotonic())

    host = SlowHost()
    script = "call('note', time.monotonic())\nsay(result=[sum(order['numbers']), time.monotonic()])"
    total, ended = result_of(monkeypatch, script, host)
    ((called, answered),) = host.heard  # one clock for all processes of a machine
    assert total == 3
    assert called + 0.05 <= answered <= ended


def test_a_worker_has_the_pinned_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("HARNESS_DATA_DIR", "/kept")
    script = "say(result=[os.environ.get(k) for k in ('OMP_NUM_THREADS', 'HARNESS_DATA_DIR')])"
    assert result_of(monkeypatch, script, threads=2) == ["2", "/kept"]
    assert result_of(monkeypatch, script, threads=None) == ["64", "/kept"]


@pytest.mark.parametrize("kind", [UsageError, StoreError])
def test_an_error_of_ours_comes_back_as_what_it_was(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    script = f"say(error=dict(type={kind.__name__!r}, message='no such pair', trace=None))"
    with pytest.raises(kind, match="no such pair"):
        result_of(monkeypatch, script)


def test_a_bug_in_a_worker_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    script = "say(error=dict(type='KeyError', message='x', trace='Traceback: here'))"
    with pytest.raises(WorkerError, match="KeyError: x"):
        result_of(monkeypatch, script, host)
    assert host.heard == [("Traceback: here",)]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("sys.stdin.close(); sys.exit(0)", "ended with exit code 0"),
    ],
)
def test_a_worker_that_dies_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    with pytest.raises(WorkerError, match=reason):
        result_of(monkeypatch, script)


def test_a_worker_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    script = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "call('note', os.getpid(), child.pid)\n"
        "time.sleep(600)"
    )
    with pytest.raises(WorkerError, match=r"said nothing for 0\.5 s and was ended"):
        result_of(monkeypatch, script, host, timeout_s=0.5)
    deadline = time.monotonic() + 10
    while any(map(running, host.heard[0])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(running, host.heard[0]))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_interrupt_here_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Host):
        def note(self, *arguments: Any) -> None:
            super().note(*arguments)
            raise KeyboardInterrupt

    host = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        result_of(monkeypatch, "call('note', os.getpid())\ntime.sleep(600)", host)
    assert not running(host.heard[0][0])
