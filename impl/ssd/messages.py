"""What the decoder and the draft process say to each other. Sequences go by their request ids."""

from __future__ import annotations

from typing import NamedTuple

from harness.decoder import CacheOutcome, Request, Span
from impl.ssd.speculation_cache import Outcome


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


class Ask(NamedTuple):
    """What one sequence needs: its next speculation, after this outcome (None: its first)."""

    request_id: str
    outcome: Outcome | None


class Speculate(NamedTuple):
    """Decoder: what the live sequences need, all together. Answered by `Speculations`."""

    asked: tuple[Ask, ...]


class Speculation(NamedTuple):
    """The next tokens of one sequence; their q rows are in its slot of the shared buffer.

    Attributes:
        request_id: the sequence.
        tokens: target ids.
        cache: whether the outcome was in the speculation cache; None for the first speculation.
        backup: which fallback drafted after a miss.
        guesses: outcomes that the cache held for this sequence.
    """

    request_id: str
    tokens: tuple[int, ...]
    cache: CacheOutcome | None
    backup: str | None
    guesses: int


class Speculations(NamedTuple):
    """Draft: the answer to `Speculate`, in its order, and what the draft did since its last one."""

    items: tuple[Speculation, ...]
    spans: tuple[Span, ...]
