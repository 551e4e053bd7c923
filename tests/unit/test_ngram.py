"""Prompt lookup by hand."""

import pytest

from impl.engine.ngram import continuation


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 3, 1, 2], 9, [3, 1, 2]),  # the text ends
        ([1, 2, 3, 1, 2], 0, []),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # of two occurrences the later one
        ([2, 3, 9, 5, 3, 7, 2, 3], 2, [9, 5]),  # two tokens decide, though 3 alone came later
        ([5, 5], 3, [5]),  # occurrences may overlap the ending
        ([1, 2, 9], 3, []),
        ([7], 3, []),
        ([], 3, []),
    ],
)
def test_the_tokens_behind_the_latest_longest_match(tokens, count, expected):
    assert continuation(tokens, count) == expected


def test_the_longest_ngram_is_the_callers_to_choose():
    tokens = [2, 3, 9, 5, 3, 7, 2, 3]
    assert continuation(tokens, 2, longest=1) == [7, 2]  # behind the latest 3
    four = [1, 2, 3, 4, 8, 2, 3, 4, 9, 1, 2, 3, 4]
    assert continuation(four, 1) == [9]  # by default three tokens decide
    assert continuation(four, 1, longest=4) == [8]
