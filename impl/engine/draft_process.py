"""A worker process with a device of its own, for every method that drafts beside the target.

The parent starts it with a `Worker` class and that worker's arguments; the child pins itself to its
cores, builds the worker (which loads the draft model) and lets it serve its end of the channel. A
child that fails sends its reason and ends; one that dies is noticed at the parent's next receive.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing as multiprocessing

from harness.errors import DraftProcessError, HarnessError
from impl.engine import placement
from impl.engine.channel import Channel, PeerGoneError

START_TIMEOUT_S = 300.0  # importing torch, loading and packing a large draft from a cold disk
REPLY_TIMEOUT_S = 60.0  # a draft answers within milliseconds; beyond this it hangs
CLOSE_TIMEOUT_S = 2.0


class Worker(Protocol):
    """What runs in the child."""

    def serve(self, channel: Channel) -> None:
        """Answers messages until it receives `Close`."""


class WorkerFactory(Protocol):
    """Builds the worker inside the child; must be importable there (a module-level class)."""

    def __call__(self, *arguments: Any) -> Worker: ...


class Ready(NamedTuple):
    """Child to parent, once: the worker is built. `start_s` is how long that took."""

    start_s: float


class Failure(NamedTuple):
    """Child to parent, last: why it ends."""

    reason: str
    trace: str


class Close(NamedTuple):
    """Parent to child, last."""


class DraftProcess:
    """The parent's handle on the child."""

    def __init__(
        self, factory: WorkerFactory, arguments: Sequence[Any], cores: Sequence[int]
    ) -> None:
        """Starts the child and returns when its worker is ready.

        Args:
            factory: builds the worker in the child.
            arguments: its arguments; shared tensors stay shared.
            cores: what the child pins itself to.

        Raises:
            DraftProcessError: the child failed or died while it started.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(theirs, factory, tuple(arguments), tuple(cores)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._channel = Channel(ours, self._process.sentinel)
        try:
            self.start_s = self.receive(START_TIMEOUT_S).start_s
        except BaseException:  # also Ctrl-C: leave no process behind
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Raises `DraftProcessError` when the child is gone."""
        try:
            self._channel.send(message)
        except PeerGoneError:
            while True:  # whatever it sent before it went; its `Failure`, or else the end, raises
                self.receive()

    def poll(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._channel.poll()

    def receive(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """The child's next message. Raises `DraftProcessError` when it failed, died or hangs."""
        try:
            message = self._channel.receive(timeout_s)
        except TimeoutError as error:
            raise DraftProcessError(
                f"draft process {self.pid}: no answer within {timeout_s:g} s"
            ) from error
        except PeerGoneError as error:
            raise self._died() from error
        if isinstance(message, Failure):
            raise DraftProcessError(f"draft process {self.pid}: {message.reason}")
        return message

    def close(self) -> None:
        """Ends the child: asks first, then kills. Safe to call twice."""
        with contextlib.suppress(PeerGoneError, OSError):  # it may be gone already
            self._channel.send(Close())
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._channel.close()

    def _died(self) -> DraftProcessError:
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return DraftProcessError(f"draft process {self.pid}: died ({how})")


def _main(
    connection: Connection, factory: WorkerFactory, arguments: tuple[Any, ...], cores: Sequence[int]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    channel = Channel(connection)
    try:
        start = time.perf_counter()
        placement.apply(cores)
        worker = factory(*arguments)
        channel.send(Ready(time.perf_counter() - start))
        worker.serve(channel)
    except PeerGoneError:
        return  # the parent died: nobody is left to tell
    except Exception as error:
        known = isinstance(error, HarnessError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        channel.send(Failure(reason, traceback.format_exc()))
        raise
