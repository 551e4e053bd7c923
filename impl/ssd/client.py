"""The decoder's side of the conversation with its draft process: what was asked, what came back."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from harness.decoder import Span, SpanKind
from impl.engine.draft_client import DraftClient
from impl.engine.draft_process import DraftProcess
from impl.engine.sampling import Verification
from impl.engine.sequence import Sequence
from impl.engine.waiting import waiting
from impl.ssd.messages import Ask, Speculate, Speculation, Speculations
from impl.ssd.speculation_cache import Outcome


class Received(NamedTuple):
    """The speculations of the live sequences, in their order, and where the time went."""

    speculations: list[Speculation]
    spans: list[Span]


class SpeculationClient(DraftClient):
    """Asks for speculations.

    Attributes:
        latest: the draft's latest answer; None before the first.
    """

    def __init__(self, process: DraftProcess) -> None:
        super().__init__(process)
        self.latest: Speculations | None = None
        self._outstanding: set[str] = set()  # asked for, no answer read yet
        self._answers: dict[str, Speculation] = {}  # read, not verified yet
        self._spans: list[Span] = []

    def release(self, sequence: Sequence) -> None:
        """See `DraftClient.release`."""
        request_id = sequence.request.request_id
        self._answers.pop(request_id, None)
        self._outstanding.discard(request_id)
        super().release(sequence)

    def report(self, sequences: List[Sequence], outcomes: List[Verification]) -> None:
        """Sends the outcomes of the sequences that go on."""
        self._ask(
            Ask(sequence.request.request_id, Outcome(outcome.accepted, outcome.token))
            for sequence, outcome in zip(sequences, outcomes, strict=True)
            if sequence.finish is None
        )

    def receive(self, live: List[Sequence]) -> Received:
        """Waits until every live sequence has its speculation; asks for the new ones' first."""
        start_ns = time.perf_counter_ns()
        names = [sequence.request.request_id for sequence in live]
        known = self._outstanding | self._answers.keys()
        self._ask(Ask(name, None) for name in names if name not in known)
        while not self._answers.keys() >= set(names):
            self._take(self.process.receive())
        end_ns = time.perf_counter_ns()
        beside = [span for span in self._spans if span.kind is SpanKind.SPECULATE]
        told = [span for span in self._spans if span.kind is not SpanKind.SPECULATE]
        self._spans = []
        spans = [*beside, *waiting(told, start_ns, end_ns)]
        return Received([self._answers.pop(name) for name in names], spans)

    def _ask(self, asks: Iterable[Ask]) -> None:
        if asked := tuple(asks):
            self.process.send(Speculate(asked))
            self._outstanding.update(ask.request_id for ask in asked)

    def _take(self, message: Speculations) -> None:
        """Keeps the answers of sequences that still wait for them."""
        for item in message.items:
            if item.request_id in self._outstanding:
                self._outstanding.remove(item.request_id)
                self._answers[item.request_id] = item
        self._spans += message.spans
        self.latest = message
