"""What a target waits for, by the clock that it shares with its draft process. Knows no method."""

from __future__ import annotations

from collections.abc import Iterable

from harness.decoder import Span, SpanKind


def waiting(told: Iterable[Span], start_ns: int, end_ns: int) -> list[Span]:
    """The target's idle time [start, end], told apart by what its draft process did meanwhile.

    Between the spans that the draft tells of it was busy with something else, which the target
    waited for. Behind the last one its message was on its way.

    Args:
        told: in the messages that came, by time, each before `end_ns`: when the draft received a
            message or handed q's over (TRANSFER), and when it drafted what the target waits for
            (DRAFT). Where none came, all of the time is a wait.
        start_ns: since when the target has been idle; what lies before it is left out.
        end_ns: until when.
    """
    spans: list[Span] = []
    cursor, last = start_ns, SpanKind.WAIT
    for span in told:
        last = SpanKind.TRANSFER
        if span.end_ns > cursor:
            first = max(span.start_ns, cursor)
            _add(spans, Span(SpanKind.WAIT, cursor, first))
            _add(spans, Span(span.kind, first, span.end_ns))
            cursor = span.end_ns
    _add(spans, Span(last, cursor, end_ns))
    return spans


def _add(spans: list[Span], span: Span) -> None:
    """Puts a span behind those that it follows without a gap; one kind makes one span."""
    if span.end_ns <= span.start_ns:
        return
    if spans and spans[-1].kind is span.kind:
        span = span._replace(start_ns=spans.pop().start_ns)
    spans.append(span)
