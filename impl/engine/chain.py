"""A chain: what the draft goes on to say behind one text, token by token, without being asked.

    text | s_1 s_2 ... s_i | s_i+1 ... s_j | s_j+1 ...
           verified          drafted         not drafted yet

Decoder and draft process keep one chain for each sequence. It goes on for as long as the target
accepts it; a token that is not the chain's ends it, and the next one starts behind that token. A
chain has a number of its own, by which tokens that were still on their way when it ended are told
apart from those of its successor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.decoder import Span, SpanKind
from impl.engine.sampling import Verification
from impl.engine.sequence import Sequence


@dataclass(slots=True)
class Chain:
    """See the module docstring.

    Attributes:
        number: unique in its decoder.
        most: tokens worth drafting before the sequence reaches a limit.
        ends: tokens behind which nothing is worth drafting.
        allowed: how many tokens may be drafted for now.
        text_length: tokens of the text that it starts behind.
        tokens: drafted so far.
        verified: how many of them the target has accepted.
    """

    number: int
    most: int
    ends: frozenset[int]
    allowed: int
    text_length: int
    tokens: list[int] = field(default_factory=list)
    verified: int = 0

    @classmethod
    def behind(cls, sequence: Sequence, number: int, allowed: int) -> Chain:
        """An empty chain behind a sequence's text."""
        most, ends = sequence.draft_limit(sys.maxsize), sequence.request.eos_token_ids
        return cls(number, most, ends, allowed, len(sequence.tokens))

    @property
    def ended(self) -> bool:
        """Whether it will never have more tokens."""
        return len(self.tokens) >= self.most or (bool(self.tokens) and self.tokens[-1] in self.ends)

    @property
    def growing(self) -> bool:
        """Whether its next token is to be drafted."""
        return not self.ended and len(self.tokens) < self.allowed

    def has(self, count: int) -> bool:
        """Whether `count` tokens wait for verification, or all that will ever come."""
        return self.ended or len(self.tokens) >= self.verified + count

    def follow(self, judged: int, outcome: Verification) -> bool:
        """Takes the outcome of verifying the next `judged` tokens: whether the chain goes on.

        It does if the target has emitted nothing but the chain's own tokens.
        """
        if outcome.token_drafted:
            self.verified += judged
        return outcome.token_drafted


class StartChain(NamedTuple):
    """Decoder: draft on behind the corrected text. Not answered.

    Attributes:
        request_id: the sequence.
        number: of the new chain.
        emitted: tokens that the text has gained since the last chain started.
        allowed: see `Chain`.
    """

    request_id: str
    number: int
    emitted: tuple[int, ...]
    allowed: int


class AllowMore(NamedTuple):
    """Decoder: the current chain may grow to `allowed` tokens. Not answered."""

    request_id: str
    allowed: int


class DraftedToken(NamedTuple):
    """The next token of a chain. The q of token i is in row i, modulo the rows, of the buffer."""

    request_id: str
    number: int
    token: int


class Drafted(NamedTuple):
    """Draft: what a pass has added, one token to each growing chain.

    Attributes:
        tokens: the new ones.
        span: when it ran.
        drawn_ns: when the tokens were drawn; the rest of the span went into handing their q's over.
        received: when messages were received since the last pass; the draft may have listened for
            them long.
    """

    tokens: tuple[DraftedToken, ...]
    span: Span
    drawn_ns: int
    received: tuple[Span, ...]

    @property
    def transfers(self) -> tuple[Span, ...]:
        """What of the draft's time belongs to messages and q's."""
        return (*self.received, Span(SpanKind.TRANSFER, self.drawn_ns, self.span.end_ns))
