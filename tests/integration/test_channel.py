"""Messages and shared tensors between two real processes, and what each end sees of a lost peer."""

import multiprocessing
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from harness.decoder import Request
from impl.engine.channel import Channel, PeerGoneError, share


@pytest.fixture
def ends():
    """Both ends, in this process."""
    ours, theirs = multiprocessing.Pipe()
    yield Channel(ours), Channel(theirs)
    ours.close()
    theirs.close()


def _double(connection, tensor):
    """The other process: doubles the shared tensor each time it is told to."""
    channel = Channel(connection)
    while channel.receive() != "end":
        tensor *= 2
        channel.send(float(tensor.sum()))


def test_a_shared_tensor_is_seen_by_both_processes():
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    tensor = share(2, 3)
    tensor += 1
    process = context.Process(target=_double, args=(theirs, tensor), daemon=True)
    process.start()
    theirs.close()
    channel = Channel(ours, process.sentinel)
    channel.send("go")
    assert channel.receive(60) == 12.0
    assert tensor.tolist() == [[2.0] * 3] * 2
    tensor.fill_(5)
    channel.send("go")
    assert channel.receive(60) == 60.0
    channel.send("end")
    process.join(10)
    with pytest.raises(PeerGoneError):
        channel.receive(10)
    channel.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    messages = [Request("a", tuple(range(5000)), 7), "text", None, ("pair", 2)]
    for message in messages:
        here.send(message)
    assert [there.receive(1) for _ in messages] == messages


def test_a_message_larger_than_the_pipe_gets_through(ends):
    here, there = ends
    large = bytes(5_000_000)
    sender = threading.Thread(target=here.send, args=(large,))
    sender.start()
    assert there.receive(10) == large
    sender.join()


def test_poll_says_whether_a_message_waits(ends):
    here, there = ends
    assert not there.poll()
    here.send(1)
    assert there.poll()
    there.receive()
    assert not there.poll()


def test_no_message_in_time_is_a_timeout(ends):
    here, _ = ends
    with pytest.raises(TimeoutError):
        here.receive(0.01)


def test_what_the_peer_sent_before_it_went_is_still_read(ends):
    here, there = ends
    there.send("last words")
    there.close()
    assert here.poll()
    assert here.receive(1) == "last words"
    assert here.poll()  # `receive` returns at once, with an error
    with pytest.raises(PeerGoneError):
        here.receive(1)


def test_sending_to_nobody_says_that_the_peer_is_gone(ends):
    here, there = ends
    there.close()
    with pytest.raises(PeerGoneError):
        here.send("anyone?")


def test_a_peer_that_dies_in_the_middle_of_a_message_is_gone():
    ours, theirs = socket.socketpair()
    channel = Channel(Connection(ours.detach()))
    theirs.sendall(struct.pack("!i", 100) + b"only a part")
    theirs.close()
    with pytest.raises(PeerGoneError):
        channel.receive(1)
    channel.close()


def test_a_peer_that_closed_on_an_unread_message_is_gone():
    ours, theirs = multiprocessing.Pipe()
    channel = Channel(ours)
    channel.send("never read")
    theirs.close()  # resets the connection
    with pytest.raises(PeerGoneError):
        channel.receive(1)
    channel.close()


def test_a_shared_tensor_leaves_no_file_behind():
    tensor = share(4, 8, 1024)
    assert tensor.is_shared()
    assert not tensor.any()
    del tensor
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
