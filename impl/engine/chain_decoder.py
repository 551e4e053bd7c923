"""The target's half of the methods whose draft extends chains (`impl.engine.chain`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as List
from dataclasses import replace

import torch

from harness.decoder import DecoderSetup, Round, Span, SpanKind
from impl.engine.asynchronous_decoder import AsynchronousDecoder, AsynchronousOptions
from impl.engine.chain import AllowMore, Chain, Drafted, StartChain
from impl.engine.chain_drafter import ChainDrafter
from impl.engine.draft_client import DraftClient
from impl.engine.draft_process import DraftProcess
from impl.engine.engine_decoder import settle
from impl.engine.sampling import Draft, Verification
from impl.engine.sequence import Sequence
from impl.engine.waiting import waiting


class ChainClient(DraftClient):
    """The decoder's copy of every chain.

    Attributes:
        chains: by request id.
        passes: draft passes reported since they were last taken.
    """

    def __init__(self, process: DraftProcess) -> None:
        super().__init__(process)
        self.chains: dict[str, Chain] = {}
        self.passes: list[Span] = []
        self._transfers: list[Span] = []  # told of since the last wait began
        self._numbers = itertools.count()

    def chain(self, sequence: Sequence) -> Chain | None:
        """A sequence's chain; None before its first and when the draft is gone."""
        return self.chains.get(sequence.request.request_id)

    def start(self, sequence: Sequence, allowed: int) -> None:
        """Starts a chain behind the sequence's text; tokens of its last one are dropped."""
        request_id, last = sequence.request.request_id, self.chain(sequence)
        emitted = () if last is None else tuple(sequence.tokens[last.text_length :])
        chain = self.chains[request_id] = Chain.behind(sequence, next(self._numbers), allowed)
        self.process.send(StartChain(request_id, chain.number, emitted, allowed))

    def start_missing(self, sequences: List[Sequence], allowed: int) -> None:
        """Starts the first chain of each sequence that has none."""
        for sequence in sequences:
            if self.chain(sequence) is None:
                self.start(sequence, allowed)

    def allow(self, sequence: Sequence, allowed: int) -> None:
        """Lets the sequence's chain grow to `allowed` tokens."""
        self.chains[sequence.request.request_id].allowed = allowed
        self.process.send(AllowMore(sequence.request.request_id, allowed))

    def collect(self) -> None:
        """Takes what is there."""
        while self.process.poll():
            self._take(self.process.receive())

    def wait(self, sequences: List[Sequence], counts: List[int]) -> list[Span]:
        """Takes what is there, and what comes until each sequence has so many unverified tokens.

        Returns:
            The transfers that these messages tell of.
        """
        self._transfers = []
        self.collect()
        for sequence, count in zip(sequences, counts, strict=True):
            while (chain := self.chain(sequence)) and not chain.has(count):
                self._take(self.process.receive())
        return self._transfers

    def take_passes(self) -> list[Span]:
        """The draft passes reported since the last call."""
        passes, self.passes = self.passes, []
        return passes

    def release(self, sequence: Sequence) -> None:
        """See `DraftClient.release`."""
        self.chains.pop(sequence.request.request_id, None)
        super().release(sequence)

    def _take(self, message: Drafted) -> None:
        """Keeps the tokens of current chains; those of a chain that has ended came too late."""
        for drafted in message.tokens:
            chain = self.chains.get(drafted.request_id)
            if chain is not None and chain.number == drafted.number:
                chain.tokens.append(drafted.token)
        self.passes.append(message.span)
        self._transfers += message.transfers


class ChainDecoder(AsynchronousDecoder):
    """Base of AMUSD and PEARL: they differ in when they wait and how far the draft may go ahead."""

    draft: ChainClient

    def __init__(self, setup: DecoderSetup, options: AsynchronousOptions, rows: int) -> None:
        """Args: `rows` is how many tokens of a chain may wait for verification."""
        super().__init__(setup, options, rows)
        arguments = (self.draft_spec, self.q_buffer, setup.max_context)
        self.draft = ChainClient(self.start_process(ChainDrafter, arguments))

    def start_chains(self, live: List[Sequence], allowed: int) -> None:
        """Lets the draft begin for sequences that have just been admitted."""
        if self.degraded is not None:
            self.draft.chains.clear()
        self.ask_draft(self.draft.start_missing, live, allowed)

    def wait(self, live: List[Sequence], counts: List[int]) -> list[Span]:
        """Waits until each sequence has so many unverified tokens, or its chain has ended."""
        start_ns = time.perf_counter_ns()
        transfers = self.ask_draft(self.draft.wait, live, counts) or []
        return waiting(transfers, start_ns, time.perf_counter_ns())

    def unverified(self, live: List[Sequence], counts: List[int]) -> list[Draft]:
        """The next tokens of each chain for the target to score, at most so many."""
        chains = [self.draft.chain(sequence) for sequence in live]
        tokens = [[] if chain is None else chain.tokens[chain.verified :] for chain in chains]
        return [
            Draft(torch.tensor(own[:count], dtype=torch.int64))
            for own, count in zip(tokens, counts, strict=True)
        ]

    def conclude(
        self,
        live: List[Sequence],
        fed: List[Draft],
        logits: List[torch.Tensor],
        spans: List[Span],
        allowed: int,
    ) -> list[Round]:
        """Judges what was scored, each draft with the next token of its chain if that is there.

        That token takes the bonus token's place (`sampling.verify`). Accepted, the chain goes on;
        otherwise the draft starts a new one behind the emitted token.

        Args:
            live: the sequences.
            fed: the tokens of each that the target scored.
            logits: its logits.
            spans: where the time went until now.
            allowed: how many tokens a new chain may have at first.
        """
        drafts = [self._to_judge(*pair) for pair in zip(live, fed, strict=True)]
        outcomes, judging = self.verifier.judge(live, drafts, logits)
        settled = [settle(*case) for case in zip(live, drafts, outcomes, strict=True)]
        for sequence, draft, outcome in zip(live, drafts, outcomes, strict=True):
            if sequence.finish is None:
                self._follow(sequence, draft, outcome, allowed)
        self.ask_for_more()
        told = (
            *self.draft.take_passes(),
            *spans,
            judging._replace(start_ns=spans[-1].end_ns),
            Span(SpanKind.TRANSFER, judging.end_ns, time.perf_counter_ns()),
        )
        return [replace(done, spans=told) for done in settled]

    def ask_for_more(self) -> None:
        """Lets chains grow whose tokens have been accepted; a method may do so elsewhere."""

    def _to_judge(self, sequence: Sequence, fed: Draft) -> Draft:
        """The scored tokens and the next one, with the q's that they were drawn from."""
        chain = self.draft.chain(sequence)
        if chain is None:
            return fed
        first, rows = chain.verified, self.q_buffer.shape[1]
        tokens = chain.tokens[first : first + len(fed.tokens) + 1]
        if sequence.request.sampling.temperature == 0 or not tokens:
            return Draft(torch.tensor(tokens, dtype=torch.int64))
        return self.drawn(sequence, tokens, [(first + i) % rows for i in range(len(tokens))])

    def _follow(
        self, sequence: Sequence, draft: Draft, outcome: Verification, allowed: int
    ) -> None:
        chain = self.draft.chain(sequence)
        if chain is None or not chain.follow(len(draft.tokens), outcome):
            self.ask_draft(self.draft.start, sequence, allowed)
