"""The worker process and its handle: start, failure, death, hang, close; with real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import DraftProcessError, ModelError, RequestError
from impl.engine.device_process import Close
from impl.engine.draft_process import DraftProcess

CORES = (0,)
SOON_S = 5.0


class Echo:
    """Answers each message with itself; some messages make it misbehave first."""

    def __init__(self, *arguments):
        if arguments == ("fail",):
            raise ModelError("folder: no weights there; give another")
        if arguments == ("exit",):
            os._exit(7)

    def serve(self, channel):
        while True:
            match channel.receive():
                case "fail":
                    raise RequestError("request a: not today")
                case "bug":
                    raise KeyError("a bug")
                case "ignore":
                    pass
                case "cores":
                    channel.send(sorted(os.sched_getaffinity(0)))
                case "busy":
                    time.sleep(60)
                case Close():
                    return
                case message:
                    channel.send(message)


@pytest.fixture(params=["shared", "distributed"])
def draft(request):
    process = DraftProcess(Echo, (), CORES, request.param)
    yield process
    process.close()


def wait_until_dead(pid):
    deadline = time.monotonic() + SOON_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def send_until_noticed(draft):
    """A killed process is a zombie before its last thread lets go of the pipe."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        draft.send("hello")
        time.sleep(0.02)


def test_answers_pins_itself_and_ends_on_close(draft):
    draft.send("hello")
    assert draft.receive(SOON_S) == "hello"
    draft.send("cores")
    assert draft.receive(SOON_S) == [0]
    assert draft.start_s >= 0
    draft.close()
    assert not psutil.pid_exists(draft.pid)
    draft.close()  # twice is fine


def test_a_death_that_is_waited_for_is_told_at_once_with_its_signal(draft):
    os.kill(draft.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(DraftProcessError, match=rf"draft process {draft.pid}: .*SIGKILL"):
        draft.receive()
    assert time.monotonic() - start < SOON_S


def test_a_message_to_a_dead_child_tells_of_its_death(draft):
    os.kill(draft.pid, signal.SIGKILL)
    wait_until_dead(draft.pid)
    with pytest.raises(DraftProcessError, match="SIGKILL"):
        send_until_noticed(draft)


def test_a_child_that_fails_says_why(draft, capfd):
    draft.send("fail")
    with pytest.raises(DraftProcessError, match=f"draft process {draft.pid}: request a: not today"):
        draft.receive()


def test_a_bug_in_the_child_is_named_by_its_type(draft, capfd):
    draft.send("bug")
    with pytest.raises(DraftProcessError, match="KeyError: 'a bug'"):
        draft.receive()


def test_a_child_that_failed_between_two_messages_still_says_why(draft, capfd):
    draft.send("fail")
    wait_until_dead(draft.pid)
    with pytest.raises(DraftProcessError, match="request a: not today"):
        send_until_noticed(draft)


@pytest.mark.parametrize("channel", ["shared", "distributed"])
@pytest.mark.parametrize(
    ("argument", "reason"), [("fail", "folder: no weights there"), ("exit", "exit code 7")]
)
def test_a_child_that_fails_at_its_start_says_why_and_is_gone(argument, reason, channel, capfd):
    before = set(psutil.Process().children())
    with pytest.raises(DraftProcessError, match=reason):
        DraftProcess(Echo, (argument,), CORES, channel)
    assert {p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())} <= (
        before
    )


def test_a_hanging_child_is_told_and_killed_on_close(draft):
    os.kill(draft.pid, signal.SIGSTOP)
    draft.send("hello")
    with pytest.raises(DraftProcessError, match=r"no answer within 0\.2 s"):
        draft.receive(0.2)
    draft.close()
    assert not psutil.pid_exists(draft.pid)


def test_ctrl_c_leaves_the_child_to_its_parent(draft):
    os.kill(draft.pid, signal.SIGINT)
    draft.send("hello")
    assert draft.receive(SOON_S) == "hello"


@pytest.mark.parametrize(
    ("message", "channel"),
    [("ignore", "shared"), ("hello", "shared"), ("ignore", "distributed")],
)
def test_the_child_ends_by_itself_when_its_parent_is_killed(message, channel):
    script = textwrap.dedent(f"""
        import time
        from test_draft_process import Echo
        from impl.engine.draft_process import DraftProcess
        if __name__ == "__main__":
            draft = DraftProcess(Echo, (), (0,), {channel!r})
            draft.send({message!r})
            print(draft.pid, flush=True)
            time.sleep(60)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_dead(child)
