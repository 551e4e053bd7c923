"""The draft process of the methods that draft without being asked: it extends chains.

    loop:
        if no message waits and a chain is growing: one pass, a token for every growing chain; send
        else: receive
            StartChain: the text was corrected; what was drafted behind it is dropped
            AllowMore: the target has accepted more of the chain, so more of it may be drafted

Draws: a chain is a speculation with a stream of its own (`drafter.draft_uniform`), named by the
output position where it starts. It starts behind a newly emitted token, so no two chains of a
sequence start at one position, and a position that is drafted again is drawn by fresh numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import torch

from harness.decoder import Span, SpanKind
from impl.engine.chain import AllowMore, Chain, Drafted, DraftedToken, StartChain
from impl.engine.channel import Channel
from impl.engine.device_process import Close
from impl.engine.draft_client import Prefill, Prefilled, Release
from impl.engine.drafter import Drafter, Proposal
from impl.engine.models import ModelSpec
from impl.engine.sequence import Sequence


@dataclass(slots=True)
class _Growth:
    """A chain and the proposal that draws its tokens."""

    chain: Chain
    proposal: Proposal


class ChainDrafter:
    """The worker; see the module docstring."""

    def __init__(self, spec: ModelSpec, q_buffer: torch.Tensor, max_context: int) -> None:
        """Loads the draft model.

        Args:
            spec: the draft model.
            q_buffer: shared float32 [slots, rows, Vd]; a chain's token i has its q in row i modulo
                the rows, so at most that many tokens of it may wait for verification.
            max_context: most tokens of one sequence.
        """
        self.drafter = Drafter(spec.load(), len(q_buffer), max_context)
        self.q_buffer = q_buffer
        self.max_context = max_context
        self.sequences: dict[str, Sequence] = {}
        self.growths: dict[str, _Growth] = {}
        self.received: list[Span] = []  # messages, since the last pass

    def serve(self, channel: Channel) -> None:
        """Works until told to close."""
        channel.offer(self.q_buffer)
        while True:
            growing = [growth for growth in self.growths.values() if growth.chain.growing]
            if growing and not channel.poll():
                channel.send(self._extend(growing))
                continue
            match self._receive(channel):
                case StartChain() as message:
                    self._start(message)
                case AllowMore(request_id, allowed):
                    self.growths[request_id].chain.allowed = allowed
                case Prefill() as message:
                    self._prefill(message)
                    channel.send(Prefilled(message.request.request_id))
                case Release(request_id):
                    del self.sequences[request_id]
                    self.growths.pop(request_id, None)
                case Close():
                    return

    def _receive(self, channel: Channel) -> Any:
        listening_ns = time.perf_counter_ns()
        message = channel.receive()
        self.received.append(Span(SpanKind.TRANSFER, listening_ns, time.perf_counter_ns()))
        return message

    def _prefill(self, message: Prefill) -> None:
        sequence = Sequence(message.request, message.slot, self.max_context)
        self.drafter.prefill(sequence)
        self.sequences[message.request.request_id] = sequence

    def _start(self, message: StartChain) -> None:
        sequence = self.sequences[message.request_id]
        sequence.append(message.emitted)
        chain = Chain.behind(sequence, message.number, message.allowed)
        self.growths[message.request_id] = _Growth(chain, self.drafter.begin(sequence, chain.most))

    def _extend(self, growths: List[_Growth]) -> Drafted:
        """One pass: the next token of each chain."""
        start_ns = time.perf_counter_ns()
        self.drafter.extend([growth.proposal for growth in growths])
        drawn_ns = time.perf_counter_ns()
        tokens = tuple(self._take(growth) for growth in growths)
        span = Span(SpanKind.SPECULATE, start_ns, time.perf_counter_ns())
        received, self.received = tuple(self.received), []
        return Drafted(tokens, span, drawn_ns, received)

    def _take(self, growth: _Growth) -> DraftedToken:
        """Hands the token just drawn to its chain, and its q to the buffer."""
        chain, proposal = growth.chain, growth.proposal
        row, token = len(chain.tokens) % self.q_buffer.shape[1], proposal.tokens[-1]
        chain.tokens.append(token)
        if proposal.rows:
            self.q_buffer[proposal.sequence.slot, row] = proposal.rows.pop()[0]
        return DraftedToken(proposal.sequence.request.request_id, chain.number, token)
