"""Messages and shared tensors between two real processes, and what each end sees of a lost peer."""

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from harness.decoder import Request, SamplingParams
from impl.engine.channel import Channel, PeerGoneError, share
from impl.engine.distributed_channel import Meeting, join
from impl.engine.sampling import Draft, verify


def pipe_ends():
    ours, theirs = multiprocessing.Pipe()
    return Channel(ours), Channel(theirs)


def distributed_ends():
    meeting = Meeting()
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(join, meeting.address)
        return meeting.accept(None, 60), theirs.result()


@pytest.fixture(params=[pipe_ends, distributed_ends], ids=["shared", "distributed"])
def ends(request):
    """Both ends, in this process."""
    ours, theirs = request.param()
    yield ours, theirs
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


def send_until_noticed(end):
    """What is sent first over TCP is what the closed end answers."""
    for _ in range(100):
        end.send("anyone?")
        time.sleep(0.01)


def test_sending_to_nobody_says_that_the_peer_is_gone(ends):
    here, there = ends
    there.close()
    with pytest.raises(PeerGoneError):
        send_until_noticed(here)


def test_a_peer_that_dies_in_the_middle_of_a_message_is_gone():
    ours, theirs = socket.socketpair()
    channel = Channel(Connection(ours.detach()))
    theirs.sendall(struct.pack("!i", 100) + b"only a part")
    theirs.close()
    with pytest.raises(PeerGoneError):
        channel.receive(1)
    channel.close()


def test_a_peer_that_closed_on_an_unread_message_is_gone(ends):
    here, there = ends
    here.send("never read")
    assert there.poll()
    there.close()  # resets the connection
    with pytest.raises(PeerGoneError):
        here.receive(1)


def test_a_shared_tensor_leaves_no_file_behind():
    tensor = share(4, 8, 1024)
    assert tensor.is_shared()
    assert not tensor.any()
    del tensor
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


# --- q rows --------------------------------------------------------------------------------------


def lost():
    raise LookupError("the draft is gone")


@pytest.fixture
def rows():
    """q rows [2 slots, 3 places, 4 columns], offered over a distributed channel, and its ends."""
    here, there = distributed_ends()
    offered = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.0, 0.2, 0.1]]).repeat(2, 1, 1)
    offered[1] = offered[1].flip(-1)
    there.offer(offered)
    yield here.remote_rows(offered.shape, lost), offered, there
    here.withdraw()
    here.close()
    there.close()


def test_shared_memory_needs_no_remote_rows():
    here, there = pipe_ends()
    there.offer(torch.ones(1, 1, 1))
    assert here.remote_rows((1, 1, 1), lost) is None
    here.close()
    there.close()


def test_the_probabilities_of_drafted_tokens_come_at_once_and_a_row_when_asked(rows):
    remote, offered, _ = rows
    first = remote.draft(0, [2, 0], [3, 1], None)
    second = remote.draft(1, [1], [2], None)  # on its way before the first was read
    assert [first.mass(i) for i in range(2)] == pytest.approx([0.1, 0.2])
    assert first.row(0).tolist() == offered[0, 2].tolist()
    assert second.mass(0) == 0.25
    offered[1, 1] = torch.tensor([0.0, 0.0, 0.0, 1.0])  # rows are read when they are asked for
    assert second.row(0).tolist() == [0, 0, 0, 1]


def test_columns_of_a_trimmed_vocabulary_are_found(rows):
    remote, _, _ = rows
    draft = remote.draft(0, [0, 2], [40, 9], torch.tensor([3, 9, 17, 40]))
    assert [draft.mass(0), draft.mass(1)] == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.6, 0.99])
def test_verification_is_that_of_a_draft_in_shared_memory(rows, uniform):
    """p = (0.4, 0.3, 0.2, 0.1) behind every token, which q holds likelier than p does."""
    remote, offered, _ = rows
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(3, 4)
    tokens, places, params = [3, 0], [0, 2], SamplingParams(temperature=1.0)
    near = Draft(torch.tensor(tokens), offered[0, places])
    far = remote.draft(0, places, tokens, None)
    uniforms = [uniform, uniform, 0.5]
    outcome = verify(logits, far, params, uniforms)
    assert outcome == verify(logits, near, params, uniforms)
    # Token 3 is accepted below 0.1 / 0.4, token 0 below 0.4 / 0.7.
    assert outcome.accepted == (2 if uniform < 0.25 else 0)


def test_a_draft_that_is_gone_is_told_by_whoever_knows_why():
    meeting, context = Meeting(), torch.multiprocessing.get_context("spawn")
    process = context.Process(target=_offer_and_die, args=(meeting.address,), daemon=True)
    process.start()
    channel = meeting.accept(process.sentinel, 60)
    remote = channel.remote_rows((1, 1, 1), lost)
    assert remote.draft(0, [0], [0], None).mass(0) == 1.0
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(LookupError, match="the draft is gone"):
        remote.draft(0, [0], [0], None).mass(0)
    channel.withdraw()
    channel.close()


def _offer_and_die(address):
    channel = join(address)
    channel.offer(torch.ones(1, 1, 1))
    channel.receive()


def test_nobody_joins_without_the_key():
    meeting = Meeting()
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(join, meeting.address._replace(key=b"another"))
        with pytest.raises((PeerGoneError, AuthenticationError)):
            meeting.accept(None, 60)
        with pytest.raises((EOFError, OSError, AuthenticationError)):
            stranger.result()


def test_a_peer_that_dies_before_it_joins_is_told():
    process = torch.multiprocessing.get_context("spawn").Process(target=os._exit, args=(3,))
    process.start()
    with pytest.raises(PeerGoneError):
        Meeting().accept(process.sentinel, 60)
    process.join()
