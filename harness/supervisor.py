"""Starts a worker process for each task of a run, answers its calls, and tells how it ended.

This process loads no model and does nothing while a worker measures. A worker that fails, is
killed, or says nothing for too long ends with a `WorkerError`; its draft processes end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from harness import errors
from harness.errors import HarnessError, WorkerError

COMMAND = (sys.executable, "-m", "harness.worker")
_END_S = 10.0  # for a worker to end after its last word
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def pinned_environment(threads: int) -> dict[str, str]:
    """Variables that every worker gets, whatever the shell has: threads, no random hashes."""
    fixed = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    return {**dict.fromkeys(_THREADS, str(threads)), **fixed}


class Call(NamedTuple):
    """A worker calls a method of its host and waits for the answer."""

    method: str
    arguments: tuple[Any, ...]


def call_worker(
    order: Mapping[str, Any], host: Any, *, threads: int | None, timeout_s: float | None
) -> Any:
    """Runs one task in a fresh process.

    Args:
        order: the task and its arguments (see `harness.worker`), JSON values.
        host: its methods are called as the worker says.
        threads: of the worker, by environment; None leaves the environment alone.
        timeout_s: most seconds between two calls of the worker's; None waits for ever.

    Returns:
        The task's result.

    Raises:
        HarnessError: as the task raised it, of its class.
        WorkerError: the task failed otherwise, died or hung.
    """
    with closing(worker_calls(order, threads=threads, timeout_s=timeout_s)) as calls:
        while True:
            try:
                call = next(calls)
            except StopIteration as ended:
                return ended.value
            getattr(host, call.method)(*call.arguments)


def worker_calls(
    order: Mapping[str, Any], *, threads: int | None, timeout_s: float | None
) -> Generator[Call, None, Any]:
    """The calls of a task in a fresh process, for a host that is elsewhere; see `call_worker`.

    Going on to the next call answers the one before. Closing the generator ends the process.

    Returns:
        The task's result.
    """
    pinned = {} if threads is None else pinned_environment(threads)
    with _worker({**os.environ, **pinned}) as process:
        _send(process, {**order, "parent": os.getpid()})
        for message in _messages(process, timeout_s):
            if "call" in message:
                yield Call(message["call"], tuple(message["arguments"]))
                _send(process, {})
            elif "error" in message:
                if trace := message["error"]["trace"]:  # a bug: whoever mends it needs it
                    yield Call("note", (trace,))
                raise _error(message["error"])
            else:
                return message["result"]
        raise WorkerError(_how_it_ended(process))


@contextmanager
def _worker(environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process group of its own, which ends as a whole."""
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,  # a terminal's Ctrl-C reaches us alone
    )
    done = False
    try:
        yield process
        done = True
    finally:
        if done:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _send(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it died: reading says how
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()


def _messages(
    process: subprocess.Popen[bytes], timeout_s: float | None
) -> Iterator[dict[str, Any]]:
    """What a worker says, until it closes its end. Raises `WorkerError` when it hangs."""
    if process.stdout is None:
        return
    descriptor, unread = process.stdout.fileno(), b""
    while select.select([descriptor], [], [], timeout_s)[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
    raise WorkerError(f"the worker said nothing for {timeout_s:g} s and was ended")


def _error(told: Mapping[str, Any]) -> HarnessError:
    """The worker's exception, of its own class where that is one of ours."""
    kind = getattr(errors, told["type"], None)
    if isinstance(kind, type) and issubclass(kind, HarnessError):
        return kind(told["message"])
    return WorkerError(f"{told['type']}: {told['message']}")


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "the worker closed its pipe and did not end"
    if code == -signal.SIGKILL:
        return "the worker was killed by SIGKILL (out of memory, or by hand)"
    if code < 0:
        return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker ended with exit code {code}"
