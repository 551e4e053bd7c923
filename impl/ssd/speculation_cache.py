"""The speculation cache: which outcomes of a verification are guessed, and what each would start.

Pure bookkeeping for one sequence; what a speculation is (tokens, q's, KV) is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Speculation = TypeVar("Speculation")


class Outcome(NamedTuple):
    """How a verification ended: the key of the cache.

    Attributes:
        accepted: k, how many drafted tokens were accepted.
        token: t*, the token emitted after them.
    """

    accepted: int
    token: int


class SpeculationCache(Generic[Speculation]):
    """The speculations ready for one sequence, by outcome; at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[Outcome, Speculation] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, outcome: Outcome, speculation: Speculation) -> None:
        """Stores a speculation; one for the same outcome replaces the earlier one.

        Raises:
            ValueError: the cache is full.
        """
        if outcome not in self._entries and len(self) == self.capacity:
            raise ValueError(f"capacity: the speculation cache holds {self.capacity} outcomes only")
        self._entries[outcome] = speculation

    def lookup(self, outcome: Outcome) -> Speculation | None:
        """The speculation for what really happened: a hit; None is a miss."""
        return self._entries.get(outcome)

    def values(self) -> Iterable[Speculation]:
        """The speculations, in the order in which they were stored."""
        return self._entries.values()

    def clear(self) -> None:
        """Forgets everything: the next verification has other outcomes."""
        self._entries.clear()


def guesses(
    rows: Tensor,
    drafted: Sequence[int],
    fan_out: Sequence[int],
    *,
    ids: Tensor | None = None,
    first: int = 0,
) -> list[Outcome]:
    """The outcomes to prepare for: the draft's F_k most likely tokens at each position k.

    At k < K the drafted token s_{k+1} is left out: had it been right, it would have been accepted.

    Args:
        rows: [n, Vd], the draft's logits or probabilities of the token after k accepted ones, for
            the positions first, first + 1, ...
        drafted: s_1..s_K, target ids.
        fan_out: F of each row; [n].
        ids: int64 [Vd], target ids of the columns (a trimmed vocabulary); None when the same.
        first: position k of the first row; all K + 1 positions need not be known at once.

    Returns:
        Distinct outcomes, by position, the most likely first; fewer than F_k where the vocabulary
        has no more tokens.
    """
    most = min(max(fan_out, default=0) + 1, rows.shape[-1])  # one spare for the drafted token
    columns = rows.topk(most).indices
    ranked: list[list[int]] = (columns if ids is None else ids[columns]).tolist()
    outcomes: list[Outcome] = []
    for k, (tokens, count) in enumerate(zip(ranked, fan_out, strict=True), start=first):
        rejected = drafted[k] if k < len(drafted) else None
        outcomes += [Outcome(k, token) for token in tokens if token != rejected][:count]
    return outcomes
