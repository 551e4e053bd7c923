"""Prompt lookup by hand, and its index against the definition."""

import numpy as np
import pytest

from impl.engine.ngram import NgramIndex


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),  # the text ends: its period goes on
        ([1, 2, 3, 1, 2], 0, []),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # of two occurrences the later one
        ([2, 3, 9, 5, 3, 7, 2, 3], 2, [9, 5]),  # two tokens decide, though 3 alone came later
        ([5, 5], 3, [5, 5, 5]),  # occurrences may overlap the ending
        ([1, 2, 9], 3, []),
        ([7], 3, []),
        ([], 3, []),
    ],
)
def test_the_tokens_behind_the_latest_longest_match(tokens, count, expected):
    assert NgramIndex(tokens).continuation(count) == expected


def test_which_ngrams_count_is_the_callers_to_choose():
    tokens = [2, 3, 9, 5, 3, 7, 2, 3]
    assert NgramIndex(tokens, longest=1).continuation(2) == [7, 2]  # behind the latest 3
    assert NgramIndex(tokens, shortest=3).continuation(2) == []
    four = [1, 2, 3, 4, 8, 2, 3, 4, 9, 1, 2, 3, 4]
    assert NgramIndex(four).continuation(1) == [9]  # by default three tokens decide
    assert NgramIndex(four, longest=4).continuation(1) == [8]


def definition(tokens, count, shortest, longest):
    """Every earlier place is looked at, longest n-gram and latest place first."""
    size = len(tokens)
    for n in range(min(longest, size - 1), shortest - 1, -1):
        for start in range(size - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[size - n :]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + n + i])
                return text[size:]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 3), (1, 1), (2, 5)])
def test_an_index_that_grows_finds_what_a_new_search_finds(shortest, longest):
    random = np.random.default_rng(0)
    for vocabulary in (2, 4, 12):
        tokens: list[int] = []
        index = NgramIndex(tokens, shortest, longest)
        found = 0
        while len(tokens) < 120:
            tokens += random.integers(vocabulary, size=random.integers(1, 5)).tolist()
            expected = definition(tokens, 6, shortest, longest)
            assert index.continuation(6) == expected
            found += bool(expected)
        assert found > 10


def test_a_lookup_takes_in_only_what_is_new():
    """Reads of the text: bounded by the new tokens, however long the text has become."""

    class Counted(list):
        reads = 0

        def __getitem__(self, at):
            Counted.reads += 1
            return super().__getitem__(at)

    tokens = Counted(range(5000))
    index = NgramIndex(tokens)
    Counted.reads = 0
    for token in range(100):
        tokens.append(token)
        index.continuation(8)
    assert Counted.reads < 100 * (3 + 3 + 8 + 1)  # n-grams in, endings looked up, tokens copied
