"""The speculation cache: which outcomes are guessed, and how they are found again."""

import pytest
import torch

from impl.ssd.speculation_cache import Outcome, SpeculationCache, guesses

# Likelihood order of tokens 0..4 at three positions.
ROWS = torch.tensor(
    [
        [0.1, 0.5, 0.2, 0.15, 0.05],  # 1 2 3 0 4
        [0.3, 0.1, 0.2, 0.05, 0.35],  # 4 0 2 1 3
        [0.0, 0.1, 0.2, 0.3, 0.4],  # 4 3 2 1 0
    ]
)


def test_guesses_leave_the_rejected_token_out_except_after_the_last():
    assert guesses(ROWS, drafted=[1, 0], fan_out=(2, 1, 3)) == [
        (0, 2),
        (0, 3),
        (1, 4),
        (2, 4),
        (2, 3),
        (2, 2),
    ]


def test_a_rejected_token_outside_the_top_costs_no_guess():
    assert guesses(ROWS, drafted=[4, 3], fan_out=(2, 2, 0)) == [(0, 1), (0, 2), (1, 4), (1, 0)]


def test_a_fan_out_beyond_the_vocabulary_guesses_all_of_it():
    assert len(guesses(ROWS, drafted=[1, 0], fan_out=(9, 0, 9))) == 4 + 5


def test_trimmed_columns_are_named_by_their_target_ids():
    ids = torch.tensor([50, 10, 20, 30, 40])
    assert guesses(ROWS, [10, 99], (2, 1, 1), ids=ids) == [(0, 20), (0, 30), (1, 40), (2, 40)]


def test_positions_can_arrive_in_parts():
    whole = guesses(ROWS, [1, 0], (2, 2, 2))
    parts = guesses(ROWS[:2], [1, 0], (2, 2)) + guesses(ROWS[2:], [1, 0], (2,), first=2)
    assert parts == whole


def test_no_budget_and_wrong_lengths():
    assert guesses(ROWS, [1, 0], (0, 0, 0)) == []
    with pytest.raises(ValueError, match="zip"):
        guesses(ROWS, [1, 0], (1, 1))


def test_lookup_hits_the_exact_outcome_only():
    cache = SpeculationCache[str](capacity=2)
    cache.insert(Outcome(1, 7), "a")
    cache.insert(Outcome(2, 7), "b")

    assert cache.lookup(Outcome(1, 7)) == "a"
    assert cache.lookup(Outcome(2, 7)) == "b"
    assert cache.lookup(Outcome(0, 7)) is None
    assert cache.lookup(Outcome(1, 8)) is None


def test_the_cache_is_bounded_and_merges_equal_outcomes():
    cache = SpeculationCache[int](capacity=1)
    cache.insert(Outcome(0, 1), 10)
    cache.insert(Outcome(0, 1), 11)
    assert len(cache) == 1
    assert cache.lookup(Outcome(0, 1)) == 11
    with pytest.raises(ValueError, match="capacity"):
        cache.insert(Outcome(0, 2), 12)

    cache.clear()
    assert len(cache) == 0
    assert cache.lookup(Outcome(0, 1)) is None
