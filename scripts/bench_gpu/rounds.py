"""Rounds of whole decoders: how long, and what of it is neither the target's pass nor the draft."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harness.decoder import (
    CacheOutcome,
    Decoder,
    DecoderSetup,
    Placement,
    Request,
    Round,
    SpanKind,
)
from impl.engine.models import Models

PROMPT = 128  # tokens
WARM_UP = 30  # rounds that nothing is kept of: shapes are recorded, costs are learnt
CONTEXT = 2048


@dataclass(frozen=True)
class TimedRound:
    """A step, and the next one's beginning.

    Attributes:
        round: what it did.
        start_ns, end_ns: around the step.
    """

    round: Round
    start_ns: int
    end_ns: int

    def spent_ns(self, *kinds: SpanKind) -> int:
        """On the critical path, on these kinds of work.

        The transfer that ends a round tells the draft the outcome, which is the host's own work.
        """
        spans = self.round.spans
        if spans and spans[-1].kind is SpanKind.TRANSFER:
            spans = spans[:-1]
        inside = (
            min(span.end_ns, self.end_ns) - max(span.start_ns, self.start_ns)
            for span in spans
            if span.kind in kinds
        )
        return sum(part for part in inside if part > 0)


@dataclass(frozen=True)
class RoundTimes:
    """Medians over the rounds of one kind, in milliseconds.

    Attributes:
        method: of them all.
        kind: "all", "hit" or "miss".
        rounds: how many.
        tokens: emitted by a round, the mean.
        round_ms: from a round's beginning to the next one's.
        verify_ms, draft_ms, wait_ms: of it, by the decoder's own account; transfers are waits.
        host_ms: the rest, when the device of the target has nothing to do.
    """

    method: str
    kind: str
    rounds: int
    tokens: float
    round_ms: float
    verify_ms: float
    draft_ms: float
    wait_ms: float
    host_ms: float

    @property
    def gap(self) -> float:
        """What lies between two verifications, as a share of one."""
        return (self.round_ms - self.verify_ms) / self.verify_ms

    @property
    def host_share(self) -> float:
        """How much of that gap is host time."""
        return self.host_ms / (self.round_ms - self.verify_ms)


def run_rounds(
    name: str, decoder: type[Decoder], models: Models, placement: Placement, *,
    rounds: int, **options: object,
) -> list[TimedRound]:  # fmt: skip
    """Decodes one sequence for so many rounds, behind those of the warm-up."""
    setup = DecoderSetup(
        models=models,
        options=decoder.Options(**options),
        placement=placement,
        max_context=CONTEXT,
    )
    running = decoder.create(setup)
    try:
        running.start([Request(name, tuple(range(PROMPT)), CONTEXT - PROMPT)])
        found = [_timed_step(running) for _ in range(WARM_UP + rounds)]
    finally:
        running.close()
    return found[WARM_UP:]


def summarise(method: str, timed: Sequence[TimedRound]) -> list[RoundTimes]:
    """Of all rounds, and where there is a cache of hits and misses."""
    following = list(itertools.pairwise(timed))
    kinds = {"all": following}
    for outcome in CacheOutcome:
        kinds[outcome.value] = [pair for pair in following if pair[0].round.cache is outcome]
    return [_summary(method, kind, pairs) for kind, pairs in kinds.items() if pairs]


def _timed_step(decoder: Decoder) -> TimedRound:
    start_ns = time.perf_counter_ns()
    (found,) = decoder.step()
    return TimedRound(found, start_ns, time.perf_counter_ns())


def _summary(method: str, kind: str, pairs: Sequence[tuple[TimedRound, TimedRound]]) -> RoundTimes:
    told = ((SpanKind.VERIFY,), (SpanKind.DRAFT,), (SpanKind.WAIT, SpanKind.TRANSFER))
    spent = [[one.spent_ns(*kinds) for one, _ in pairs] for kinds in told]
    whole = [following.start_ns - one.start_ns for one, following in pairs]
    host = [total - sum(parts) for total, *parts in zip(whole, *spent, strict=True)]
    medians = (1e-6 * median(values) for values in (whole, *spent, host))
    tokens = sum(len(one.round.tokens) for one, _ in pairs) / len(pairs)
    return RoundTimes(method, kind, len(pairs), tokens, *medians)
