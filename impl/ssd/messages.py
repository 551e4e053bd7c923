"""What the decoder and the draft process of SSD say to each other, by request ids.

`impl.engine.draft_client` has the messages that every method needs.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.decoder import CacheOutcome, Span
from impl.ssd.budgeting import Costs
from impl.ssd.fallback import BackupName
from impl.ssd.speculation_cache import Outcome


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
        backup: which fallback drafted after a miss; "fast" tokens are point masses without a q.
        guesses: outcomes that the cache held for this sequence.
        hit_chance: the estimated chance that the outcome was among them; None before the first.
        rank: 1-based place of t* among what would have been guessed; None where not known.
        replica: number of the draft that has it, in whose buffer the q rows are.
        ready: whether that is all; else the draft has nothing, or more is worth drafting, and has
            not begun to. Only where there are several drafts, which then are told `Complete`.
        confidences: the draft's probabilities of the tokens, for the other drafts.
    """

    request_id: str
    tokens: tuple[int, ...]
    cache: CacheOutcome | None
    backup: BackupName | None
    guesses: int
    hit_chance: float | None
    rank: int | None
    replica: int = 0
    ready: bool = True
    confidences: tuple[float, ...] = ()


class Speculations(NamedTuple):
    """Draft: the answer to `Speculate`, in its order.

    Attributes:
        items: one for each sequence.
        spans: what the draft did since its last answer; TRANSFER is receiving what was asked, for
            which it may have listened long, and handing the q's over.
        lookahead, budget: the K and B that it works with now.
        critical_batch_size: b* of the adaptive fallback.
    """

    items: tuple[Speculation, ...]
    spans: tuple[Span, ...]
    lookahead: int
    budget: int
    critical_batch_size: float


class Complete(NamedTuple):
    """Decoder to one of several drafts: draft what these lack. Answered by `Speculations`."""

    request_ids: tuple[str, ...]


class Proceed(NamedTuple):
    """Decoder to one of several drafts: the target verifies now, of these what others have.

    Not answered.
    """

    adopted: tuple[Speculation, ...]


class Exercise(NamedTuple):
    """Decoder: run passes over these numbers of tokens, in turns, until `Rest`."""

    tokens: tuple[int, ...]


class Rest(NamedTuple):
    """Decoder: stop exercising. Answered by `Exercised`."""


class Exercised(NamedTuple):
    """Draft: quickest seconds of a pass by its number of tokens."""

    seconds: dict[int, float]


class TakeCosts(NamedTuple):
    """Decoder: pass times to go by, for batches of this size. Not answered."""

    costs: Costs
    batch_size: int
