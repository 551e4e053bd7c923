import numpy as np
import pytest
from known_process import ARGMAX, FAVOURITES, TARGET, decode, sharpened, speculate, toward
from scipy import stats

from harness.equivalence.martingale import log_probability_test, membership_test, two_sided

SEEDS = range(300)


def argmax_test(columns, mask=slice(None)):
    return membership_test("argmax", "all", columns["is_argmax"][mask], columns["argmax_p"][mask])


def draft_test(columns, size, mask=slice(None)):
    member, mass = columns[f"in_draft_top{size}"], columns[f"draft_top{size}_p"]
    return membership_test(f"draft top {size}", "all", member[mask], mass[mask])


def log_p_test(columns, mask=slice(None)):
    names = ("log_p", "log_p_mean", "log_p_variance", "log_p_third")
    return log_probability_test("all", *(columns[name][mask] for name in names))


def end_test(columns, mask=slice(None)):
    return membership_test("end", "all", columns["is_end"][mask], columns["end_p"][mask])


TESTS = {
    "argmax": argmax_test,
    "end of sequence": end_test,
    "draft top 1": lambda columns, mask=slice(None): draft_test(columns, 1, mask),
    "draft top 3": lambda columns, mask=slice(None): draft_test(columns, 3, mask),
    "log p": log_p_test,
}


def test_the_statistic_by_hand():
    member = np.repeat([True, False], (30, 10))
    found = membership_test("set", "all", member, np.full(40, 0.5))
    # 30 where 20 are due, variance 40 / 4
    assert found.statistic == pytest.approx(10 / np.sqrt(10))
    assert found.p_value == pytest.approx(2 * stats.norm.sf(10 / np.sqrt(10)))
    assert found.variance == pytest.approx(0.25)


def test_too_little_variance_is_no_test():
    assert membership_test("set", "all", np.full(39, True), np.full(39, 0.5)) is None


def test_tail_probabilities_of_a_skewed_sum():
    # 35 or more of 1,000 tokens fall into sets of probability 0.02 each; exact law: binomial
    n, p = 1000, 0.02
    variance = n * p * (1 - p)
    z = (34.5 - n * p) / np.sqrt(variance)
    exact = 2 * stats.binom.sf(34, n, p)
    assert two_sided(z, (1 - 2 * p) / np.sqrt(variance)) == pytest.approx(exact, rel=0.1)
    assert two_sided(z, 0.0) == pytest.approx(2 * stats.norm.sf(z))
    assert two_sided(z, 0.0) < exact / 1.5  # the normal law alone would raise false alarms


def test_the_skewness_of_rare_sets_counts():
    # the same 35, as a test of tokens; half of the probability of 35 itself belongs to the tail
    n, p = 1000, 0.02
    found = membership_test("set", "all", np.arange(n) < 35, np.full(n, p))
    exact = 2 * (stats.binom.sf(35, n, p) + stats.binom.pmf(35, n, p) / 2)
    assert found.p_value == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("name", TESTS)
def test_exact_decoding_that_stops_early_keeps_a_standard_normal_statistic(name):
    """Outputs end at token 0, after 1 to 60 tokens: optional stopping must not move the mean."""
    columns = [decode(TARGET, 40, 60, seed).scored() for seed in SEEDS]
    lengths = np.array([len(c["log_p"]) for c in columns])
    assert lengths.std() > 20  # the number of tokens is random, and depends on what they were
    found = [TESTS[name](c) for c in columns]
    z = np.array([test.statistic for test in found])
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert 0.85 < z.std() < 1.17
    alarms = sum(test.p_value < 0.05 for test in found)
    assert alarms <= stats.binom.ppf(0.9995, len(found), 0.05)


@pytest.mark.parametrize(
    ("table", "seen_by"),
    [
        (toward(TARGET, ARGMAX, 0.1), "argmax"),
        (toward(TARGET, FAVOURITES[:, 0], 0.1), "draft top 1"),
        (toward(TARGET, FAVOURITES[:, 2], 0.1), "draft top 3"),
        (sharpened(TARGET, 0.85), "log p"),
    ],
)
def test_each_bias_is_seen_by_its_test(table, seen_by):
    columns = decode(table, 500, 60, 5).scored()
    assert 5000 < len(columns["log_p"]) < 9000
    found = TESTS[seen_by](columns)
    assert found.statistic > 0
    assert found.p_value < 1e-5


def z_in(mask_of):
    """Argmax and draft-favourite z values of exact speculative decoding in a stratum."""
    found = []
    for seed in range(60):
        run = speculate(outputs=60, rounds=8, lookahead=3, seed=seed)
        order = np.argsort(run.tokens.output, kind="stable")
        mask = mask_of(run.index[order], run.accepted[order])
        columns = run.tokens.scored()
        found.append((argmax_test(columns, mask).statistic, draft_test(columns, 1, mask).statistic))
    return np.array(found)


@pytest.mark.parametrize("place", range(4), ids=["first", "second", "third", "bonus"])
def test_the_position_in_the_round_is_a_fair_stratum(place):
    """Position j exists only if j tokens were accepted, yet its token still follows the target."""
    z = z_in(lambda index, _: index == place)
    assert np.abs(z.mean(0)).max() < 4 / np.sqrt(len(z))
    assert 0.65 < z.std(0).min() <= z.std(0).max() < 1.4


def test_whether_the_token_was_a_draft_is_no_fair_stratum():
    """Known only afterwards: tokens that the draft overlooks are missing among those accepted."""
    z = z_in(lambda index, accepted: accepted > index)
    assert np.abs(z.mean(0)).max() > 15 / np.sqrt(len(z))
