"""A channel without shared memory: messages over TCP, q rows over `torch.distributed` (gloo).

The verifier needs little of q: the probability of each drafted token, and the whole row only of the
one that it rejects. It asks for the first before the target's pass and finds the answer behind it;
it asks for the second when it rejects. A thread beside the draft answers, so that neither waits for
a pass of the draft.

    request   int64 [3 + 2 places]   what, slot, count; places of the rows; columns
    answer    float32 [count]        of MASSES: rows[slot, place, column]
              float32 [Vd]           of ROW: rows[slot, place]
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from secrets import token_bytes
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from harness.decoder import ChannelName
from impl.engine.channel import Channel, PeerGoneError
from impl.engine.process_group import (
    LOCALHOST,
    find_store,
    join_group,
    open_store,
    peers_needed,
)
from impl.engine.sampling import Draft

_READER, _WRITER = 0, 1  # places in the group: the decoder's end, the draft's end
_END, _MASSES, _ROW = range(3)
_HEADER = 3
_END_TIMEOUT = timedelta(seconds=2)
_FOR_EVER = timedelta(days=365)  # the draft's end waits for requests as long as it lives


class Address(NamedTuple):
    """Where the decoder's end waits for the other, and the key by which they know each other."""

    host: str
    port: int
    store_port: int
    key: bytes


class DistributedChannel(Channel):
    """One end; see the module docstring."""

    name: ChannelName = "distributed"

    def __init__(
        self, connection: Connection, group: dist.ProcessGroup, peer: int | None = None
    ) -> None:
        super().__init__(connection, peer)
        self._group = group
        self._rows: RemoteRows | None = None

    def offer(self, rows: torch.Tensor) -> None:
        """See `Channel.offer`."""
        threading.Thread(target=_answer, args=(rows, self._group), daemon=True).start()

    def remote_rows(self, shape: Sequence[int], lost: Callable[[], NoReturn]) -> RemoteRows:
        """See `Channel.remote_rows`."""
        self._rows = RemoteRows(self._group, shape, lost)
        return self._rows

    def withdraw(self) -> None:
        """See `Channel.withdraw`."""
        if self._rows is not None:
            self._rows.end()
            self._rows = None


class Meeting:
    """The decoder's end before the other has come."""

    def __init__(self, host: str = LOCALHOST) -> None:
        """Listens on this address of the machine."""
        self._server = socket.create_server((host, 0))
        self._store = open_store(host)
        port = self._server.getsockname()[1]
        self.address = Address(host, port, self._store.port, token_bytes(32))

    def accept(self, peer: int | None, timeout_s: float) -> DistributedChannel:
        """Waits for the other end, of the process with the handle `peer`.

        Raises:
            TimeoutError: it does not come.
            PeerGoneError: it has died.
        """
        watched: list[socket.socket | int] = [self._server, *([] if peer is None else [peer])]
        with self._server:
            ready = wait(watched, timeout_s)
            if not ready:
                raise TimeoutError
            if self._server not in ready:
                raise PeerGoneError
            connection = _connection(self._server.accept()[0])
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
        except (EOFError, OSError) as error:
            raise PeerGoneError from error
        return DistributedChannel(connection, join_group(self._store, _READER, 2), peer)


def join(address: Address) -> DistributedChannel:
    """The draft's end. Raises `OSError` or `PeerGoneError` when nobody waits there."""
    connection = _connection(socket.create_connection((address.host, address.port)))
    answer_challenge(connection, address.key)
    deliver_challenge(connection, address.key)
    store = find_store(address.store_port, address.host)
    return DistributedChannel(connection, join_group(store, _WRITER, 2, timeout=_FOR_EVER))


class RemoteRows:
    """The decoder's view of the rows that the draft offers."""

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], lost: Callable[[], NoReturn]
    ) -> None:
        """See `Channel.remote_rows`; whatever needs the other end raises what `lost` does."""
        self._group, self._lost = group, lost
        _, self._places, self._width = shape

    def draft(
        self, slot: int, places: Sequence[int], tokens: Sequence[int], ids: torch.Tensor | None
    ) -> RemoteDraft:
        """A draft whose token i was drawn from the row at place i; asks for its probabilities.

        Args:
            slot: the sequence's.
            places: of the rows.
            tokens: target ids.
            ids: see `Draft`; ascending.
        """
        drafted = torch.tensor(tokens, dtype=torch.int64)
        columns = drafted if ids is None else torch.searchsorted(ids, drafted)
        masses = self._ask(_MASSES, len(tokens), slot, places, columns)
        return RemoteDraft(drafted, None, ids, q=RemoteQ(self, slot, tuple(places), masses))

    def row(self, slot: int, place: int) -> torch.Tensor:
        """A whole row [Vd]."""
        return self._ask(_ROW, self._width, slot, [place]).wait()

    def end(self) -> None:
        """Needs no more of them; no matter whether anybody hears it."""
        with suppress(RuntimeError):
            self._group.send([self._request(_END)], _WRITER, 0).wait(_END_TIMEOUT)

    def _ask(
        self,
        what: int,
        size: int,
        slot: int,
        places: Sequence[int],
        columns: torch.Tensor | None = None,
    ) -> _Arriving:
        """Sends a request; its answer has `size` numbers."""
        answer = torch.empty(size)
        with _or_lost(self._lost):
            self._group.send([self._request(what, slot, places, columns)], _WRITER, 0).wait()
            return _Arriving(answer, self._group.recv([answer], _WRITER, 0), self._lost)

    def _request(
        self,
        what: int,
        slot: int = 0,
        places: Sequence[int] = (),
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        request = torch.zeros(_HEADER + 2 * self._places, dtype=torch.int64)
        count = len(places)
        request[: _HEADER + count] = torch.tensor([what, slot, count, *places])
        if columns is not None:
            request[_HEADER + self._places :][:count] = columns
        return request


class _Arriving:
    """A tensor on its way."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work, lost: Callable[[], NoReturn]) -> None:
        self._tensor, self._work, self._lost = tensor, work, lost

    def wait(self) -> torch.Tensor:
        with _or_lost(self._lost):
            self._work.wait()
        return self._tensor


@contextmanager
def _or_lost(lost: Callable[[], NoReturn]) -> Iterator[None]:
    try:
        with peers_needed():
            yield
    except PeerGoneError:
        lost()


class RemoteQ:
    """The q's of one draft, as far as they are needed."""

    def __init__(
        self, rows: RemoteRows, slot: int, places: tuple[int, ...], masses: _Arriving
    ) -> None:
        self._rows, self._slot, self._places = rows, slot, places
        self._arriving = masses
        self._masses: list[float] | None = None

    def mass(self, index: int) -> float:
        """The probability of token `index`."""
        if self._masses is None:
            self._masses = self._arriving.wait().tolist()
        return self._masses[index]

    def row(self, index: int) -> torch.Tensor:
        """The distribution [Vd] that it was drawn from."""
        self.mass(index)  # answers come in the order of the requests
        return self._rows.row(self._slot, self._places[index])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RemoteDraft(Draft):
    """A draft whose q's are where they were written."""

    q: RemoteQ

    def mass(self, index: int) -> float:
        """See `Draft.mass`."""
        return self.q.mass(index)

    def row(self, index: int) -> torch.Tensor:
        """See `Draft.row`."""
        return self.q.row(index)


def _answer(rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Answers requests for rows [slots, places, Vd] until told to end, or left alone."""
    places = rows.shape[1]
    request = torch.empty(_HEADER + 2 * places, dtype=torch.int64)
    with suppress(PeerGoneError):  # the decoder is gone: the draft itself notices that
        while True:
            with peers_needed():
                group.recv([request], _READER, 0).wait()
            what, slot, count = request[:_HEADER].tolist()
            if what == _END:
                return
            own = rows[slot, request[_HEADER:][:count]]
            columns = request[_HEADER + places :][:count]
            answer = own[0] if what == _ROW else own.gather(1, columns[:, None])[:, 0]
            with peers_needed():
                group.send([answer], _READER, 0).wait()


def _connection(connected: socket.socket) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages are small
    return Connection(connected.detach())
