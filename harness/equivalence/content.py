"""What outputs look like, whatever their distribution: text that flatters or breaks a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from harness.decoder import FinishReason

_LOOP_PERIODS = range(1, 17)  # tokens
_LOOP_TAIL = 32  # tokens


@dataclass(frozen=True, slots=True)
class ContentCounts:
    """How many of some outputs are odd.

    Attributes:
        outputs: all of them.
        empty: hold nothing but an end-of-sequence token.
        loops: end in a repeated n-gram, the easiest text to speculate.
        after_eos: go on after an end-of-sequence token; never right.
        cut_at_length: were cut at max_new_tokens.
        cut_at_context: were cut at the end of the context.
    """

    outputs: int
    empty: int
    loops: int
    after_eos: int
    cut_at_length: int
    cut_at_context: int


def count_content(
    outputs: Iterable[Sequence[int]], finishes: Iterable[str], eos_token_ids: Collection[int]
) -> ContentCounts:
    """Looks at outputs and at why each of them ended (`harness.decoder.FinishReason`)."""
    outputs, finishes = list(outputs), list(finishes)
    return ContentCounts(
        outputs=len(outputs),
        empty=sum(all(token in eos_token_ids for token in output) for output in outputs),
        loops=sum(map(ends_in_loop, outputs)),
        after_eos=sum(any(t in eos_token_ids for t in output[:-1]) for output in outputs),
        cut_at_length=finishes.count(FinishReason.LENGTH),
        cut_at_context=finishes.count(FinishReason.CONTEXT),
    )


def ends_in_loop(output_ids: Sequence[int]) -> bool:
    """Whether the last `_LOOP_TAIL` tokens repeat with a period of at most half of them."""
    tail = list(output_ids[-_LOOP_TAIL:])
    if len(tail) < _LOOP_TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in _LOOP_PERIODS)
