"""Drafting without a model: what followed the last few tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3


def continuation(tokens: Sequence[int], count: int, longest: int = LONGEST) -> list[int]:
    """Prompt lookup: the `count` tokens behind the latest earlier occurrence of the ending n-gram.

    Longer n-grams are tried first, from `longest` down to 1.

    Returns:
        Fewer than `count` tokens where the occurrence lies near the end; none where the last token
        is new.
    """
    size = len(tokens)
    for n in range(min(longest, size - 1), 0, -1):
        ending = list(tokens[size - n :])
        for start in range(size - n - 1, -1, -1):
            if tokens[start] == ending[0] and list(tokens[start : start + n]) == ending:
                return list(tokens[start + n : start + n + count])
    return []
