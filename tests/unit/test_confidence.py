"""Fan-out by confidence: learned rates by hand, the allocation against sorting every outcome."""

from collections import Counter

import pytest

from impl.ssd.confidence import MAX_RANK, AcceptanceByConfidence, ConfidentFanOut, RankProfile


def test_acceptance_is_first_as_likely_as_the_draft_thinks():
    acceptance = AcceptanceByConfidence()
    # the middle of ten equal bins; 0 and 1 belong to the outermost
    means = {0.0: 0.05, 0.14: 0.15, 0.58: 0.55, 0.97: 0.95, 1.0: 0.95}
    for confidence, expected in means.items():
        assert acceptance.of(confidence) == pytest.approx(expected)


def test_acceptance_learns_what_was_decided_and_nothing_behind_it():
    acceptance = AcceptanceByConfidence()
    acceptance.observe([0.93, 0.96, 0.15], accepted=1)  # accepted, rejected, never looked at
    assert acceptance.of(0.95) == pytest.approx((4 * 0.95 + 1) / (4 + 2))
    assert acceptance.of(0.15) == pytest.approx(0.15)
    acceptance.observe([0.12], accepted=1)  # all accepted: there is no token that was rejected
    assert acceptance.of(0.15) == pytest.approx((4 * 0.15 + 1) / (4 + 1))


def test_ranks_by_hand():
    ranks = RankProfile()
    assert ranks.of(1) == pytest.approx(1 / 2)  # 1/j - 1/(j + 1), the power law at r = 1
    assert ranks.of(2) == pytest.approx(1 / 6)
    ranks.observe(2)
    assert ranks.of(1) == pytest.approx((4 / 2) / 5)
    assert ranks.of(2) == pytest.approx((4 / 6 + 1) / 5)
    ranks.observe(None)
    ranks.observe(MAX_RANK + 1)
    assert ranks.of(2) == pytest.approx((4 / 6 + 1) / 7)


def test_the_first_allocation_by_hand():
    # The draft ends behind 0, 1 or 2 tokens: 0.05, 0.95 * 0.45 = 0.4275, 0.95 * 0.55 = 0.5225.
    # Times the ranks' 1/2, 1/6, 1/12, 1/20:
    #   k = 2: .261 .0871 .0435 .0261;  k = 1: .214 .0713 .0356;  k = 0: .025 .0083
    confidences = [0.95, 0.55]
    fan_out = ConfidentFanOut()
    allocated = [fan_out.allocate(confidences, budget) for budget in range(7)]
    first_four = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)]
    assert allocated == [*first_four, (0, 2, 2), (0, 2, 3), (0, 3, 3)]


def test_hopeless_outcomes_are_not_guessed():
    fan_out = ConfidentFanOut()
    assert fan_out.allocate([0.95, 0.55], 100, least=0.05) == (0, 2, 2)
    assert fan_out.allocate([0.95, 0.55], 100, least=0.9) == (0, 0, 0)
    assert fan_out.allocate([], 100, least=0.09) == (2,)  # nothing drafted: 1/2, 1/6, 1/12


def learned():
    fan_out = ConfidentFanOut()
    for accepted, rank in ((0, 1), (1, 3), (2, 2), (3, 1), (3, 1), (1, 5), (2, None), (3, 4)):
        fan_out.observe([0.9, 0.6, 0.3], accepted, rank)
    return fan_out


def chances(fan_out, confidences):
    """(chance, k) of every outcome, likeliest first, from what has been learned."""
    reached, ends = 1.0, []
    for confidence in confidences:
        accepted = fan_out.acceptance.of(confidence)
        ends.append(reached * (1 - accepted))
        reached *= accepted
    rows = [(end, fan_out._rejected) for end in ends] + [(reached, fan_out._bonus)]
    found = [
        (end * ranks.of(rank), k)
        for k, (end, ranks) in enumerate(rows)
        for rank in range(1, MAX_RANK + 1)
    ]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("budget", [0, 1, 4, 9, 16])
@pytest.mark.parametrize("confidences", [[0.9, 0.6, 0.3], [0.99], [0.2, 0.95, 0.95, 0.5]])
def test_the_prior_allocation_is_the_likeliest_outcomes(confidences, budget):
    fan_out = ConfidentFanOut()  # its ranks fall, so greedily taking the next one is best
    counts = Counter(k for _, k in chances(fan_out, confidences)[:budget])
    expected = tuple(counts[k] for k in range(len(confidences) + 1))
    assert fan_out.allocate(confidences, budget) == expected


@pytest.mark.parametrize("budget", [0, 1, 7, 40, 10_000])
@pytest.mark.parametrize("least", [0.0, 0.005, 0.05])
def test_never_more_than_the_budget_nor_below_the_least_chance(budget, least):
    fan_out = learned()
    confidences = [0.9, 0.6, 0.3]
    allocated = fan_out.allocate(confidences, budget, least)
    assert len(allocated) == 4
    assert sum(allocated) <= budget
    assert max(allocated) <= MAX_RANK
    ends = {}
    for chance, k in chances(fan_out, confidences):
        ends.setdefault(k, []).append(chance)
    for k, count in enumerate(allocated):
        assert sum(chance > least for chance in ends[k]) >= count


def test_the_chance_of_each_guess_by_its_position_and_rank():
    fan_out = learned()
    confidences, positions = [0.9, 0.6, 0.3], [0, 0, 2, 3, 3]
    first, second = (fan_out._rejected.of(rank) for rank in (1, 2))
    a, b, c = (fan_out.acceptance.of(confidence) for confidence in confidences)
    bonus = [fan_out._bonus.of(rank) for rank in (1, 2)]
    expected = [(1 - a) * first, (1 - a) * second, a * b * (1 - c) * first]
    expected += [a * b * c * rank for rank in bonus]
    assert fan_out.chances(confidences, positions) == pytest.approx(expected)


def test_the_bonus_and_the_rejected_positions_have_ranks_of_their_own():
    fan_out = ConfidentFanOut()
    for _ in range(30):
        fan_out.observe([0.95], accepted=1, rank=3)  # the bonus token is always the third
    assert fan_out._rejected.of(1) == pytest.approx(1 / 2)
    assert fan_out._bonus.of(3) == pytest.approx((4 / 12 + 30) / 34)
