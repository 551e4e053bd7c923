"""Messages between two processes, and the q rows that one of them leaves for the other to read.

A message is a picklable NamedTuple. Inside a machine it goes through a pipe, and q rows are in
memory that both processes map (`share`): one writes them before it sends the message that tells the
other to read. `impl.engine.distributed_channel` has what works between machines. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from harness.decoder import ChannelName

if TYPE_CHECKING:
    from impl.engine.distributed_channel import RemoteRows


class PeerGoneError(Exception):
    """The other process closed its end or died."""


class Channel:
    """One end of a two-way connection."""

    name: ChannelName = "shared"

    def __init__(self, connection: Connection, peer: int | None = None) -> None:
        """`peer` is a handle that becomes readable when the other process dies."""
        self._connection = connection
        self._watched: list[Connection | int] = [connection] if peer is None else [connection, peer]

    def send(self, message: object) -> None:
        """Raises `PeerGoneError` when nobody is there to read."""
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGoneError from error

    def poll(self) -> bool:
        """Whether `receive` would return at once. True as well when the peer is gone."""
        try:
            return self._connection.poll()
        except ConnectionResetError:
            return True

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout_s` seconds.
            PeerGoneError: the other process is gone and left no message.
        """
        if not wait(self._watched, timeout_s):
            raise TimeoutError
        if not self.poll():  # so it was the peer's end that woke us
            raise PeerGoneError
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:  # OSError: it died in the middle of a message
            raise PeerGoneError from error

    def offer(self, rows: torch.Tensor) -> None:
        """Lets the other end read these rows [slots, places, Vd], as they are when it asks."""

    def remote_rows(
        self,
        shape: Sequence[int],  # noqa: ARG002
        lost: Callable[[], NoReturn],  # noqa: ARG002
    ) -> RemoteRows | None:
        """The rows that the other end offers; None where memory is shared.

        Args:
            shape: [slots, places, Vd].
            lost: raises why the other end is gone, once it is.
        """
        return None

    def withdraw(self) -> None:
        """Needs no more of the other end's rows."""

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()


def share(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A zeroed tensor in memory that a worker process maps when it is passed as an argument."""
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
