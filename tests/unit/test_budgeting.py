"""Pass times, prices and the width of a pass, by hand and against brute force."""

import itertools
import math

import pytest

from impl.ssd.budgeting import Costs, PassTimes, Prices, rows_of_a_pass


def linear(base, slope):
    return PassTimes((1, 101), (base, base + 100 * slope))


COSTS = Costs(
    verify_idle=linear(0.100, 0.006),
    verify_loaded=linear(0.125, 0.0075),
    draft_idle=linear(0.010, 0.001),
    draft_loaded=linear(0.014, 0.002),
)


def test_pass_times_between_and_beyond_what_was_measured():
    times = PassTimes.of({8: 3.0, 2: 1.0, 4: 2.0})
    assert times.tokens == (2, 4, 8)
    # 0.5 a token up to 4, 0.25 from there
    for tokens, seconds in ((2, 1.0), (3, 1.5), (4, 2.0), (6, 2.5), (8, 3.0), (12, 4.0), (1, 0.5)):
        assert times.at(tokens) == pytest.approx(seconds)
    assert PassTimes.of({5: 0.7}).at(99) == 0.7


def test_a_pass_counts_no_longer_than_a_wider_one():
    times = PassTimes.of({1: 1.0, 3: 9.0, 5: 1.4, 7: 1.2, 9: 1.6})  # 3 and 5 were disturbed
    assert times.seconds == (1.0, 1.2, 1.2, 1.2, 1.6)


def test_contention_is_what_the_target_loses_a_second():
    # a pass of 0.125 s beside the draft would have taken 0.1: a fifth of that time is lost
    assert COSTS.contention == pytest.approx(0.2)
    quicker = Costs(linear(0.2, 0.0), linear(0.1, 0.0), linear(0.01, 0.0), linear(0.01, 0.0))
    assert quicker.contention == 0.0


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_token_is_worth_its_chance_at_the_present_speed_less_its_verification(batch_size):
    prices = Prices(COSTS, batch_size, tokens_per_s=20.0)
    # 0.5 / 20 = 25 ms against 6 ms a token: as much for any sequence of a batch
    assert prices.verifying(0.5, drafted=3) == pytest.approx(0.019)
    assert prices.verifying(0.1, drafted=3) == pytest.approx(-0.001)


def test_a_pass_while_the_target_waits_must_bring_more_than_its_time():
    prices = Prices(COSTS, 2, tokens_per_s=20.0)
    assert prices.drafting([0.008, 0.004]) == pytest.approx(0.012 - 0.011)  # two rows
    assert prices.drafting([0.008]) == pytest.approx(0.008 - 0.010)


def test_a_token_built_ahead_saves_itself_or_the_pass_of_a_miss():
    prices = Prices(COSTS, 1, tokens_per_s=20.0)
    assert prices.ahead(0.3, gain=0.5, first=False) == pytest.approx(0.3 * 0.5)
    assert prices.ahead(0.3, gain=0.5, first=True) == pytest.approx(0.3 * 0.010)  # the backup's
    assert prices.ahead(0.3, gain=0.004, first=True) == pytest.approx(0.3 * 0.004)  # done without
    assert prices.ahead(0.3, gain=-0.1, first=False) == 0.0


@pytest.mark.parametrize("remaining", [math.inf, 0.020, 0.0])
@pytest.mark.parametrize("given", [0, 1, 3])
def test_the_width_of_a_pass_saves_most_a_second(given, remaining):
    times = linear(0.014, 0.002)
    for savings in itertools.product((0.01, 0.004, 0.001, 0.0001), repeat=4):
        ordered = sorted(savings, reverse=True)
        rates = [
            (sum(ordered[:n]) - max(0.0, times.at(given + n) - remaining)) / times.at(given + n)
            for n in range(1, 5)
        ]
        chosen = rows_of_a_pass(ordered, times, remaining=remaining, least=0.2, given=given)
        bar = 0.0 if given else 0.2
        if max(rates) <= bar:
            assert chosen == 0
        else:
            assert rates[chosen - 1] == pytest.approx(max(rates))


def test_no_pass_where_the_target_loses_more_than_is_saved():
    times = linear(0.014, 0.002)
    # one row of 3 ms saved in 14 ms: 0.214 a second
    assert rows_of_a_pass([0.003], times, least=0.21) == 1
    assert rows_of_a_pass([0.003], times, least=0.22) == 0
    assert rows_of_a_pass([], times, least=0.0) == 0
