"""What the target's idle time went into, worked out by hand; the target is idle from 10 to 60."""

import pytest

from harness.decoder import Span, SpanKind
from impl.engine.waiting import waiting

WAIT, DRAFT, TRANSFER = SpanKind.WAIT, SpanKind.DRAFT, SpanKind.TRANSFER


def received(start: int, end: int) -> Span:
    return Span(TRANSFER, start, end)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # Busy with a pass until 30; drafts; hands q's over until 55; its answer is there at 60.
        (
            [received(30, 32), Span(DRAFT, 32, 50), received(50, 55)],
            [(WAIT, 10, 30), (TRANSFER, 30, 32), (DRAFT, 32, 50), (TRANSFER, 50, 60)],
        ),
        # It had listened since 0, so the message was on its way from the beginning.
        (
            [received(0, 12), Span(DRAFT, 12, 14), received(14, 15)],
            [(TRANSFER, 10, 12), (DRAFT, 12, 14), (TRANSFER, 14, 60)],
        ),
        # Drafting began before the target waited; what was done by then is nobody's wait.
        (
            [received(2, 4), Span(DRAFT, 4, 20), received(20, 25)],
            [(DRAFT, 10, 20), (TRANSFER, 20, 60)],
        ),
        # All was ready: only the message is left.
        ([received(1, 2), Span(DRAFT, 2, 3), received(3, 4)], [(TRANSFER, 10, 60)]),
        # Two answers: between them the draft was at something else.
        (
            [received(8, 12), Span(DRAFT, 12, 20), received(40, 41), Span(DRAFT, 41, 50)],
            [
                (TRANSFER, 10, 12),
                (DRAFT, 12, 20),
                (WAIT, 20, 40),
                (TRANSFER, 40, 41),
                (DRAFT, 41, 50),
                (TRANSFER, 50, 60),
            ],
        ),
        # Nothing came.
        ([], [(WAIT, 10, 60)]),
    ],
)
def test_idle_time_is_told_apart(told, expected):
    assert waiting(told, 10, 60) == expected


def test_no_time_at_all_has_no_spans():
    assert waiting([received(0, 5)], 10, 10) == []
