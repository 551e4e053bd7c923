"""Measuring pass times, on a clock that only the models move."""

import time
from types import SimpleNamespace

import pytest
import torch

from impl.engine.draft_client import Release
from impl.ssd.calibration import CONTEXT, REPEATS, ROWS, TOKENS, exercise, measure_costs
from impl.ssd.messages import Exercise, Exercised, Rest


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Model:
    """A pass takes `seconds_of(tokens)`; keeps where each one began."""

    device = torch.device("cpu")

    def __init__(self, clock, seconds_of):
        self.clock, self.seconds_of, self.passes = clock, seconds_of, []

    def forward(self, batch, cache):
        (segment,) = batch.segments
        self.passes.append((segment.slot, segment.start, segment.count))
        self.clock.now += self.seconds_of(segment.count)


class Draft:
    """Works between `Exercise` and `Rest`; its passes take twice as long the first time."""

    def __init__(self, seconds):
        self.seconds, self.working, self.sent = seconds, False, []
        self.factors = iter([2, 1])

    def send(self, message):
        self.sent.append(message)
        self.working = isinstance(message, Exercise)

    def receive(self):
        factor = next(self.factors)
        return Exercised({size: factor * seconds for size, seconds in self.seconds.items()})


CACHE = SimpleNamespace(cells=1000)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_target_passes_are_timed_alone_and_beside_the_working_draft(clock, batch_size):
    draft = Draft({batch_size * rows: 0.01 * rows for rows in ROWS})
    target = Model(clock, lambda tokens: (0.2 if draft.working else 0.1) + 0.001 * tokens)
    costs = measure_costs(target, CACHE, [draft], batch_size)
    assert costs.verify_idle.tokens == tuple(batch_size * n for n in TOKENS)
    for n in TOKENS:
        tokens = batch_size * n
        assert costs.verify_idle.at(tokens) == pytest.approx(0.1 + 0.001 * tokens)
        assert costs.verify_loaded.at(tokens) == pytest.approx(0.2 + 0.001 * tokens)
    assert costs.draft_loaded.at(batch_size * ROWS[1]) == pytest.approx(0.02 * ROWS[1])
    assert costs.draft_idle.at(batch_size * ROWS[1]) == pytest.approx(0.01 * ROWS[1])
    assert draft.sent == [Exercise(tuple(batch_size * n for n in ROWS)), Rest()] * 2


def test_one_slow_pass_does_not_count(clock):
    times = iter([9.0] + [0.1] * 1000)
    costs = measure_costs(Model(clock, lambda _: next(times)), CACHE, [Draft({1: 1.0})], 1)
    assert costs.verify_idle.at(TOKENS[0]) == pytest.approx(0.1)
    assert REPEATS >= 3


def test_a_disturbance_that_outlasts_a_few_passes_does_not_count(clock):
    times = iter([9.0] * len(TOKENS) + [0.1] * 1000)  # as many as a sweep over all sizes
    costs = measure_costs(Model(clock, lambda _: next(times)), CACHE, [Draft({1: 1.0})], 1)
    assert costs.verify_idle.seconds == pytest.approx((0.1,) * len(TOKENS))


def test_passes_lie_behind_some_context_where_the_cache_has_room(clock):
    model = Model(clock, lambda _: 0.1)
    measure_costs(model, CACHE, [Draft({1: 1.0})], 1)
    assert {(slot, start) for slot, start, _ in model.passes} == {(0, CONTEXT)}
    small = Model(clock, lambda _: 0.1)
    measure_costs(small, SimpleNamespace(cells=40), [Draft({1: 1.0})], 1)
    assert all(start + count <= 40 for _, start, count in small.passes)


def channel(polls, message):
    """Has a message from the poll number `polls` on."""
    left = iter([False] * polls)
    return SimpleNamespace(poll=lambda: next(left, True), receive=lambda: message)


def test_the_draft_exercises_until_told_to_rest(clock):
    model = Model(clock, lambda tokens: 0.01 * tokens)
    assert exercise(model, CACHE, (2, 8), channel(3, Rest())) == pytest.approx({2: 0.02, 8: 0.08})
    assert [count for *_, count in model.passes] == [2, 8] * 3


def test_the_draft_times_every_size_enough_even_when_told_to_rest_at_once(clock):
    times = iter([9.0, 9.0] + [0.1] * 1000)
    model = Model(clock, lambda _: next(times))
    assert exercise(model, CACHE, (2, 8), channel(0, Rest())) == pytest.approx({2: 0.1, 8: 0.1})


def test_any_other_message_is_a_bug(clock):
    with pytest.raises(TypeError, match="expected Rest"):
        exercise(Model(clock, lambda _: 0.1), CACHE, (2,), channel(0, Release("a")))
