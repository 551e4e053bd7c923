"""Drafting without a model: what followed the last few tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3


class NgramIndex:
    """Prompt lookup (Saxena 2023) in a text that grows at its end.

    Every n-gram is kept with the place behind its latest occurrence, so that a lookup costs the
    tokens that came since the last one and not the length of the text.
    """

    def __init__(self, tokens: Sequence[int], shortest: int = 1, longest: int = LONGEST) -> None:
        """Indexes a text.

        Args:
            tokens: the text; later calls see what was appended to it since.
            shortest: of the n-grams looked for, at least 1.
            longest: of them, at least `shortest`.
        """
        self.tokens = tokens
        self._sizes = range(shortest, longest + 1)
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token behind it
        self._indexed = 0  # n-grams that end before this index are in
        self._update()

    def continuation(self, count: int) -> list[int]:
        """`count` tokens from behind the latest earlier occurrence of the ending n-gram.

        Longer n-grams are tried first. Where the end of the text comes before `count` tokens, they
        are repeated from the occurrence on: the text is taken to be periodic.

        Returns:
            No token where the ending occurred nowhere before.
        """
        self._update()
        tokens, size = self.tokens, len(self.tokens)
        for n in reversed(self._sizes):
            start = self._behind.get(tuple(tokens[size - n :])) if n < size else None
            if start is not None:
                period = size - start
                return [tokens[start + i % period] for i in range(count)]
        return []

    def _update(self) -> None:
        """Takes in the n-grams that end before the last token: those with a token behind them."""
        tokens = self.tokens
        for end in range(max(self._indexed, 1), len(tokens)):
            for n in self._sizes:
                if n <= end:
                    self._behind[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens))
