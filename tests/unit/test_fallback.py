"""When the adaptive choice leaves the draft model for the fast backup, by hand."""

import math

import pytest

from harness.decoder import CacheOutcome
from impl.ssd.fallback import AdaptiveFallback

HIT, MISS = CacheOutcome.HIT, CacheOutcome.MISS


def speeds(batch_size, h, e_hit, neural, fast, neural_time):
    """Tokens a verification under either backup; a build of exactly one verification."""
    together = h**batch_size
    return tuple(
        (h * e_hit + (1 - h) * tokens) / (together + (1 - together) * (1 + time))
        for tokens, time in ((neural, neural_time), (fast, 0.0))
    )


def test_the_larger_the_batch_the_sooner_fast_wins():
    # Priors: h .7, E 3 on hits and of the draft model, 1.3 of the fast backup, T_b .5.
    # Alone 3 / 1.15 = 2.61 beats 2.49; of two, 3 / 1.255 = 2.39 does not.
    fallback = AdaptiveFallback()
    for size in range(1, 9):
        by_model, by_text = speeds(size, 0.7, 3.0, 3.0, 1.3, 0.5)
        assert fallback.choose(size, found=True) == ("fast" if by_text > by_model else "neural")
    assert [fallback.choose(size, found=True) for size in (1, 2)] == ["neural", "fast"]
    assert 1 < fallback.critical_batch_size() < 2


def test_at_the_critical_batch_size_both_are_equally_fast():
    by_model, by_text = speeds(AdaptiveFallback().critical_batch_size(), 0.7, 3.0, 3.0, 1.3, 0.5)
    assert by_model == pytest.approx(by_text)


def test_a_backup_that_takes_no_time_is_always_the_model():
    fallback = AdaptiveFallback()
    for _ in range(100):
        fallback.observe_backup_time(0.0)
    assert fallback.critical_batch_size() == math.inf
    assert fallback.choose(1000, found=True) == "neural"


def test_a_slow_draft_model_loses_even_alone():
    fallback = AdaptiveFallback()
    for _ in range(100):
        fallback.observe_backup_time(2.0)  # 3 / (.7 + .3 * 3) = 1.88 < 2.49
    assert fallback.choose(1, found=True) == "fast"


def test_without_an_n_gram_the_fast_backup_brings_the_targets_token_only():
    fallback = AdaptiveFallback()
    for size in range(1, 9):
        by_model, by_nothing = speeds(size, 0.7, 3.0, 3.0, 1.0, 0.5)
        expected = "fast" if by_nothing > by_model else "neural"
        assert fallback.choose(size, found=False) == expected


def test_each_backup_is_credited_with_its_own_tokens():
    fallback = AdaptiveFallback()
    fallback.observe(MISS, "fast", emitted=4, missed=False)  # 1.3 -> 1.57; h .7 -> .73
    fallback.observe(MISS, "neural", emitted=5, missed=True)  # 3 -> 3.2; h -> .657
    fallback.observe(HIT, None, emitted=2, missed=False)  # 3 -> 2.9; h -> .6913
    fallback.observe(None, None, emitted=9, missed=True)  # a first round; h -> .62217
    fallback.observe_backup_time(0.7)  # .5 -> .52
    by_model, by_text = speeds(fallback.critical_batch_size(), 0.62217, 2.9, 3.2, 1.57, 0.52)
    assert by_model == pytest.approx(by_text)
