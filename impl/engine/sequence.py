"""Sequences being decoded: their tokens, where they stop, and which slot they own.

The one place that knows about end-of-sequence tokens, stop sequences, token limits and the context
limit; methods only ask how far they may draft and hand over what was accepted.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.decoder import FinishReason, Request
from harness.errors import RequestError
from impl.engine.randomness import RandomStream


class Sequence:
    """One live request.

    Attributes:
        request: what was asked for.
        slot: its slot in every KV cache of the decoder.
        tokens: prompt and output. All but the last, the pending token, are in the target's cache.
        output_length: tokens emitted so far; also the counter of its random streams.
        finish: why it ended; None while it is live.
        stream: its random numbers.
    """

    def __init__(self, request: Request, slot: int, max_context: int) -> None:
        self.request = request
        self.slot = slot
        self.tokens = list(request.prompt_ids)
        self.output_length = 0
        self.finish: FinishReason | None = None
        self.stream = RandomStream(request.sampling.seed, request.request_id)
        self._max_context = max_context

    def draft_limit(self, lookahead: int) -> int:
        """How many tokens are worth drafting: the round emits one more than it accepts."""
        room = self._max_context - len(self.tokens) - 1
        wanted = self.request.max_new_tokens - self.output_length - 1
        return max(0, min(lookahead, room, wanted))

    def append(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Takes the tokens of a round up to the first that ends the sequence, sets `finish`.

        Returns:
            The tokens that count as emitted.
        """
        emitted = []
        for token in tokens:
            self.tokens.append(token)
            self.output_length += 1
            emitted.append(token)
            self.finish = self._finish_after(token)
            if self.finish is not None:
                break
        return tuple(emitted)

    def _finish_after(self, token: int) -> FinishReason | None:
        request = self.request
        if token in request.eos_token_ids:
            return FinishReason.EOS
        if any(self._output_ends_in(stop) for stop in request.stop_sequences):
            return FinishReason.STOP
        if self.output_length >= request.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(self.tokens) >= self._max_context else None

    def _output_ends_in(self, stop: tuple[int, ...]) -> bool:
        size = len(stop)
        return 0 < size <= self.output_length and tuple(self.tokens[-size:]) == stop


class SequenceSlots:
    """The sequences of a decoder, at most one a slot."""

    def __init__(self, slots: int, max_context: int) -> None:
        self._sequences: list[Sequence | None] = [None] * slots
        self._max_context = max_context

    def check(self, request: Request) -> None:
        """Raises `RequestError` for a request that cannot be decoded at all."""
        size, name = len(request.prompt_ids), request.request_id
        if size == 0:
            raise RequestError(f"request {name}: the prompt is empty; give at least one token")
        if size >= self._max_context:
            raise RequestError(
                f"request {name}: its prompt of {size} tokens leaves no room in a context of "
                f"{self._max_context}; shorten it or raise max_context"
            )
        if request.max_new_tokens < 1:
            raise RequestError(f"request {name}: max_new_tokens must be at least 1")

    def open(self, request: Request) -> Sequence:
        """Gives the request a free slot. Raises `RequestError` when there is none."""
        self.check(request)
        if request.request_id in (sequence.request.request_id for sequence in self.all()):
            raise RequestError(f"request {request.request_id}: already live")
        if None not in self._sequences:
            raise RequestError(
                f"request {request.request_id}: all {len(self._sequences)} slots are taken"
            )
        slot = self._sequences.index(None)
        sequence = Sequence(request, slot, self._max_context)
        self._sequences[slot] = sequence
        return sequence

    def close(self, request_id: str) -> Sequence:
        """Frees the slot of a request. Raises `RequestError` when it has none."""
        for slot, sequence in enumerate(self._sequences):
            if sequence is not None and sequence.request.request_id == request_id:
                self._sequences[slot] = None
                return sequence
        raise RequestError(f"request {request_id}: not live")

    def all(self) -> list[Sequence]:
        """Every sequence that holds a slot, finished or not."""
        return [sequence for sequence in self._sequences if sequence is not None]

    def live(self) -> list[Sequence]:
        """The sequences to advance, in the order of their slots."""
        return [sequence for sequence in self.all() if sequence.finish is None]
