"""A worker process with a device of its own: the draft beside the target, a rank of the target.

The parent starts it with a `Worker` class and that worker's arguments; the child pins itself to its
cores, builds the worker (which loads its model) and lets it serve its end of the channel. A child
that fails sends its reason and ends; one that dies is noticed at the parent's next receive.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol

import torch.multiprocessing as multiprocessing

from harness.decoder import ChannelName
from harness.errors import HarnessError
from impl.engine import placement
from impl.engine.channel import Channel, PeerGoneError

if TYPE_CHECKING:
    from impl.engine.distributed_channel import Address, RemoteRows

START_TIMEOUT_S = 300.0  # importing torch, loading and packing a large model from a cold disk
REPLY_TIMEOUT_S = 60.0  # a worker answers within milliseconds; beyond this it hangs
CLOSE_TIMEOUT_S = 2.0


class Worker(Protocol):
    """What runs in the child."""

    def serve(self, channel: Channel) -> None:
        """Answers messages until it receives `Close`."""


class WorkerFactory(Protocol):
    """Builds the worker inside the child; must be importable there (a module-level class)."""

    def __call__(self, *arguments: Any) -> Worker: ...


Work = tuple[WorkerFactory, tuple[Any, ...]]


class Ready(NamedTuple):
    """Child to parent, once: the worker is built. `start_s` is how long that took."""

    start_s: float


class Failure(NamedTuple):
    """Child to parent, last: why it ends."""

    reason: str
    trace: str


class Close(NamedTuple):
    """Parent to child, last."""


class DeviceProcess:
    """The parent's handle on the child.

    Class attributes:
        error: raised when the child fails, dies or hangs.

    Attributes:
        role: what the child is called in messages.
        start_s: how long its worker took to build, once `wait_until_ready` has returned.
    """

    error: ClassVar[type[HarnessError]]

    def __init__(
        self,
        role: str,
        factory: WorkerFactory,
        arguments: Sequence[Any],
        cores: Sequence[int],
        channel: ChannelName = "shared",
    ) -> None:
        """Starts the child; its worker is built when `wait_until_ready` returns.

        Args:
            role: what the child is called in messages.
            factory: builds the worker in the child.
            arguments: its arguments; shared tensors stay shared, unless the channel shares none.
            cores: what the child pins itself to.
            channel: how messages and q rows travel.
        """
        self.role = role
        self.start_s = 0.0
        work = (factory, tuple(arguments))
        if channel == "shared":
            self._start_beside(work, tuple(cores))
        else:
            self._start_apart(work, tuple(cores))

    def _start_beside(self, work: Work, cores: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, work, cores), daemon=True)
        self._process.start()
        theirs.close()
        self._channel = Channel(ours, self._process.sentinel)

    def _start_apart(self, work: Work, cores: tuple[int, ...]) -> None:
        """Tells the child nothing but where to come; all else is in messages."""
        from impl.engine.distributed_channel import Meeting

        meeting = Meeting()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_main_apart, args=(meeting.address, cores), daemon=True
        )
        self._process.start()
        try:
            self._channel = meeting.accept(self._process.sentinel, START_TIMEOUT_S)
            self._channel.send(pickle.dumps(work))  # by value: no tensor is shared
        except PeerGoneError as error:
            raise self._died() from error
        except BaseException:  # also Ctrl-C: leave no process behind
            self._process.kill()
            raise

    def wait_until_ready(self) -> None:
        """Returns when the child's worker is built. Raises `error` when it failed or died."""
        try:
            self.start_s = self.receive(START_TIMEOUT_S).start_s
        except BaseException:  # also Ctrl-C: leave no process behind
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the child ended: minus a signal's number when it was killed, None while it lives."""
        return self._process.exitcode

    def send(self, message: object) -> None:
        """Raises `error` when the child is gone."""
        try:
            self._channel.send(message)
        except PeerGoneError:
            self._lost()

    def poll(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._channel.poll()

    def receive(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """The child's next message. Raises `error` when it failed, died or hangs."""
        try:
            message = self._channel.receive(timeout_s)
        except TimeoutError as error:
            raise self._told(f"no answer within {timeout_s:g} s") from error
        except PeerGoneError as error:
            raise self._died() from error
        if isinstance(message, Failure):
            raise self._told(message.reason)
        return message

    def remote_rows(self, shape: Sequence[int]) -> RemoteRows | None:
        """See `Channel.remote_rows`."""
        return self._channel.remote_rows(shape, self._lost)

    def close(self) -> None:
        """Ends the child: asks first, then kills. Safe to call twice."""
        with contextlib.suppress(PeerGoneError, OSError):  # it may be gone already
            self._channel.withdraw()
            self._channel.send(Close())
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._channel.close()

    def _lost(self) -> NoReturn:
        while True:  # whatever it sent before it went; its `Failure`, or else the end, raises
            self.receive()

    def _told(self, reason: str) -> HarnessError:
        return self.error(f"{self.role} {self.pid}: {reason}")

    def _died(self) -> HarnessError:
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return self._told(f"died ({how})")


def _main(connection: Connection, work: Work, cores: Sequence[int]) -> None:
    """The child beside its parent."""
    _serve(Channel(connection), lambda _: work, cores)


def _main_apart(address: Address, cores: Sequence[int]) -> None:
    """The child that comes to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from impl.engine.distributed_channel import join

    _serve(join(address), lambda channel: pickle.loads(channel.receive()), cores)


def _serve(channel: Channel, find_work: Callable[[Channel], Work], cores: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        start = time.perf_counter()
        placement.apply(cores)
        factory, arguments = find_work(channel)
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
