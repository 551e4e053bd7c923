"""SSD/Saguaro (arXiv 2603.03251): the draft speculates for the outcomes of the verification.

A round of the target, for all live sequences together:

    receive the speculations for the last outcomes      (a hit is there already; a miss is drafted)
    verify them in one pass
    send the outcomes, so that the draft looks them up while the round is written down
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import NamedTuple

import torch

from harness.decoder import DecoderSetup, Round, Span, SpanKind
from impl.engine.channel import share
from impl.engine.draft_process import DraftProcess
from impl.engine.engine_decoder import EngineDecoder, settle
from impl.engine.loader import read_config
from impl.engine.models import draft_spec_of
from impl.engine.sampling import Draft, Verification
from impl.engine.sequence import Sequence
from impl.ssd.messages import Ask, Prefill, Release, Speculate, Speculation, Speculations
from impl.ssd.options import SaguaroOptions
from impl.ssd.speculation_cache import Outcome
from impl.ssd.speculator import Speculator


class _Received(NamedTuple):
    """The speculations of the live sequences, in their order, and where the time went."""

    speculations: list[Speculation]
    spans: list[Span]


class SaguaroDecoder(EngineDecoder):
    """The target's half; the draft's half is `Speculator`, in a process on its own cores."""

    name = "ssd"
    Options = SaguaroOptions
    needs_draft = True
    asynchronous = True

    def __init__(self, setup: DecoderSetup, options: SaguaroOptions) -> None:
        super().__init__(setup)
        spec = draft_spec_of(setup)
        self.options = options
        self.head_ids = spec.head_ids()
        width = len(self.head_ids) if self.head_ids is not None else _vocabulary(spec.folder)
        self.q_buffer = share(setup.batch_size, options.lookahead, width)
        self._outstanding: set[str] = set()  # asked for, no answer read yet
        self._answers: dict[str, Speculation] = {}  # read, not verified yet
        self._spans: list[Span] = []
        arguments = (spec, options, self.q_buffer, setup.max_context, setup.deterministic)
        self.draft = DraftProcess(Speculator, arguments, setup.placement.draft_cores)

    @classmethod
    def create(cls, setup: DecoderSetup) -> SaguaroDecoder:
        """See `Decoder.create`."""
        return cls(setup, SaguaroOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """One round of every live sequence; see the module docstring."""
        live = self.slots.live()
        speculations, waiting = self._receive(live)
        drafts = [self._draft_of(*pair) for pair in zip(live, speculations, strict=True)]
        outcomes, verifying = self.verifier.verify(live, drafts)
        rounds = [
            settle(
                sequence,
                draft,
                outcome,
                [*waiting, verifying],
                cache=speculation.cache,
                backup=speculation.backup,
                guesses=speculation.guesses,
            )
            for sequence, draft, outcome, speculation in zip(
                live, drafts, outcomes, speculations, strict=True
            )
        ]
        self._send(live, outcomes)
        return rounds

    def close(self) -> None:
        """See `Decoder.close`."""
        self.draft.close()

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """What this cell ran with."""
        return {"draft_start_s": self.draft.start_s, "q_buffer_bytes": self.q_buffer.nbytes}

    def _prefill(self, sequence: Sequence) -> None:
        self.draft.send(Prefill(sequence.request, sequence.slot))
        super()._prefill(sequence)
        while isinstance(message := self.draft.receive(), Speculations):
            self._take(message)

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._answers.pop(request_id, None)
        self._outstanding.discard(request_id)
        self.draft.send(Release(request_id))

    def _send(self, sequences: List[Sequence], outcomes: List[Verification]) -> None:
        """Reports how the sequences that go on were verified."""
        self._ask(
            Ask(sequence.request.request_id, Outcome(outcome.accepted, outcome.token))
            for sequence, outcome in zip(sequences, outcomes, strict=True)
            if sequence.finish is None
        )

    def _ask(self, asked: Iterable[Ask]) -> None:
        asked = tuple(asked)
        if asked:
            self.draft.send(Speculate(asked))
            self._outstanding.update(ask.request_id for ask in asked)

    def _receive(self, live: List[Sequence]) -> _Received:
        """Waits until every live sequence has its speculation; asks for the new ones' first."""
        start_ns = time.perf_counter_ns()
        names = [sequence.request.request_id for sequence in live]
        known = self._outstanding | self._answers.keys()
        self._ask(Ask(name, None) for name in names if name not in known)
        while not self._answers.keys() >= set(names):
            self._take(self.draft.receive())
        spans = _split_wait(self._spans, start_ns, time.perf_counter_ns())
        self._spans = []
        return _Received([self._answers.pop(name) for name in names], spans)

    def _take(self, message: Speculations) -> None:
        """Keeps the answers of sequences that still wait for them."""
        for item in message.items:
            if item.request_id in self._outstanding:
                self._outstanding.remove(item.request_id)
                self._answers[item.request_id] = item
        self._spans += message.spans

    def _draft_of(self, sequence: Sequence, speculation: Speculation) -> Draft:
        count = len(speculation.tokens)
        greedy = sequence.request.sampling.temperature == 0
        probs = None if greedy else self.q_buffer[sequence.slot, :count]
        return Draft(torch.tensor(speculation.tokens, dtype=torch.int64), probs, self.head_ids)


def _vocabulary(folder: Path) -> int:
    return int(read_config(folder)["vocab_size"])


def _split_wait(reported: List[Span], start_ns: int, end_ns: int) -> list[Span]:
    """The target's idle time [start, end], told apart by whether the draft drafted just in time."""
    spans = [span for span in reported if span.kind is SpanKind.SPECULATE]
    cursor = start_ns
    for span in reported:
        if span.kind is SpanKind.DRAFT and span.end_ns > cursor:
            first = max(span.start_ns, cursor)
            spans.append(Span(SpanKind.WAIT, cursor, first))
            spans.append(Span(SpanKind.DRAFT, first, span.end_ns))
            cursor = span.end_ns
    return [*spans, Span(SpanKind.WAIT, cursor, end_ns)]
