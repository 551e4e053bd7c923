"""What it takes to ask the draft process, over either channel: messages, and q rows at T > 0."""

from __future__ import annotations

import pytest
import torch

from impl.engine.channel import Channel, share
from impl.engine.device_process import Close
from impl.engine.draft_process import DraftProcess

SEQUENCES, LOOKAHEAD, WIDTH = 8, 5, 16384
ROUND_TRIP_S = 0.5e-3  # at most, in shared memory


@pytest.fixture(autouse=True)
def one_core():
    """In place of the one for the engine: here target and draft have a core each."""


class Answering:
    """A draft that writes a q of every sequence and says so, whenever it is asked."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.q = buffer, torch.rand(SEQUENCES, WIDTH)

    def serve(self, channel: Channel) -> None:
        channel.offer(self.buffer)
        while not isinstance(message := channel.receive(), Close):
            self.buffer[:, 0] = self.q
            channel.send(message)


def test_what_asking_the_draft_takes(interleaved, note):
    buffer = share(SEQUENCES, LOOKAHEAD, WIDTH)
    shared = DraftProcess(Answering, (buffer,), (0,))
    distributed = DraftProcess(Answering, (buffer,), (0,), "distributed")
    remote = distributed.remote_rows(buffer.shape)
    tokens = list(range(LOOKAHEAD))

    def round_trip(process: DraftProcess) -> None:
        process.send(("outcomes", SEQUENCES))
        process.receive()

    try:
        best = interleaved(
            {
                "shared: a message and its answer": lambda: round_trip(shared),
                "distributed: a message and its answer": lambda: round_trip(distributed),
                f"distributed: the probabilities of {LOOKAHEAD} tokens": lambda: remote.draft(
                    0, tokens, tokens, None
                ).mass(0),
                f"distributed: a q row of {WIDTH}": lambda: remote.row(0, 0),
            },
            rounds=200,
        )
    finally:
        shared.close()
        distributed.close()
    for name, seconds in best.items():
        note(f"channel {name}: {seconds * 1e3:.2f} ms")
    note(f"(a message has {SEQUENCES} x {WIDTH} float32 written; in shared memory at most 0.5 ms)")
    assert float(buffer.sum()) > 0
    assert best["shared: a message and its answer"] <= ROUND_TRIP_S
