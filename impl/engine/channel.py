"""Messages between two processes of one machine: a pipe for small ones, shared memory for tensors.

A message is a picklable NamedTuple; a tensor that both sides know from the start (`share`) is
written by one side before it sends the message that tells the other to read it. Knows no method.
"""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from typing import Any

import torch


class PeerGoneError(Exception):
    """The other process closed its end or died."""


class Channel:
    """One end of a two-way connection."""

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
        return self._connection.poll()

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout_s` seconds.
            PeerGoneError: the other process is gone and left no message.
        """
        if not wait(self._watched, timeout_s):
            raise TimeoutError
        if not self._connection.poll():  # so it was the peer's end that woke us
            raise PeerGoneError
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:  # OSError: it died in the middle of a message
            raise PeerGoneError from error

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()


def share(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A zeroed tensor in memory that a worker process maps when it is passed as an argument."""
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
