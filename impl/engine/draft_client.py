"""The decoder's end of the conversation with its draft process, as far as every method has it."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from harness.decoder import Request
from impl.engine.draft_process import DraftProcess
from impl.engine.sequence import Sequence


class Prefill(NamedTuple):
    """Decoder: cache this request's prompt in this slot. Answered by `Prefilled`."""

    request: Request
    slot: int


class Prefilled(NamedTuple):
    """Draft: the prompt is cached."""

    request_id: str


class Release(NamedTuple):
    """Decoder: the sequence has ended and its slot is free. Not answered."""

    request_id: str


class DraftClient(abc.ABC):
    """Sequences may come and go while messages of others are on their way.

    Attributes:
        process: the draft process.
    """

    def __init__(self, process: DraftProcess) -> None:
        self.process = process

    def begin_prefill(self, sequence: Sequence) -> None:
        """Lets the draft cache the prompt, beside whatever the caller does next."""
        self.process.send(Prefill(sequence.request, sequence.slot))

    def end_prefill(self) -> None:
        """Waits until the draft has done so."""
        while not isinstance(message := self.process.receive(), Prefilled):
            self._take(message)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence, whatever of it is still on its way."""
        self.process.send(Release(sequence.request.request_id))

    def close(self) -> None:
        """Ends the draft process."""
        self.process.close()

    @abc.abstractmethod
    def _take(self, message: Any) -> None:
        """Keeps what the draft sent, unless it is of a sequence that is gone."""
