import numpy as np
import pytest
import torch
from known_process import ARGMAX, TARGET, decode, sharpened, toward
from scipy import stats

from harness.equivalence.pit import (
    fresh_uniforms,
    rarest_token,
    serial_correlation,
    transform,
    uniformity,
)
from harness.equivalence.reference_scores import reduce_rows


def u_of(tokens, seed):
    columns = tokens.scored()
    uniforms = np.random.default_rng([1, seed]).random(len(columns["p_token"]))
    return transform(columns["p_above"], columns["p_token"], uniforms)


def test_tokens_are_ranked_by_probability_and_then_by_id():
    p = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.25, 0.5, 0.25], [0.25, 0.5, 0.25]])
    columns = reduce_rows(p.double(), torch.tensor([0, 1, 0, 2]), None)
    # ranked 1, 2, 0 in the first two rows; 1, 0, 2 in the others, where 0 and 2 tie
    u = transform(columns["p_above"], columns["p_token"], np.full(4, 0.5))
    assert u == pytest.approx([0.8 + 0.1, 0.25, 0.5 + 0.125, 0.75 + 0.125])
    assert columns["p_tail"] == pytest.approx([0.2, 1.0, 0.5, 0.25])


def test_the_statistic_and_its_exact_law_for_two_values():
    # the empirical distribution is 0 up to 0.9, where the uniform one is 0.9; P(D_2 >= 0.9) is the
    # chance that both values fall above 0.9 or both below 0.1
    found = uniformity(np.array([0.9, 0.95]))
    assert (found.n, found.statistic) == (2, pytest.approx(0.9))
    assert found.p_value == pytest.approx(2 * 0.1**2)


def test_exact_sampling_gives_uniform_values_and_false_alarms_at_their_rate():
    p_values = [uniformity(u_of(decode(TARGET, 20, 30, seed), seed)).p_value for seed in range(300)]
    alarms = int(np.sum(np.array(p_values) < 0.05))
    low, high = stats.binom.interval(0.999, 300, 0.05)
    assert low <= alarms <= high


@pytest.mark.parametrize(
    "table", [sharpened(TARGET, 0.8), toward(TARGET, ARGMAX, 0.15)], ids=["temperature", "argmax"]
)
def test_a_changed_distribution_is_seen(table):
    # about 5,000 tokens; exact sampling stays above 1e-4 but once in ten thousand
    assert uniformity(u_of(decode(table, 800, 40, 7), 7)).p_value < 1e-4


def test_fresh_uniforms_follow_their_key_alone():
    u = fresh_uniforms("sd/mini/t1/b1/r0/k0 mini/3/r0", 1000)
    assert np.array_equal(u[:10], fresh_uniforms("sd/mini/t1/b1/r0/k0 mini/3/r0", 10))
    other = fresh_uniforms("sd/mini/t1/b1/r0/k0 mini/4/r0", 1000)
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.13  # four standard errors
    assert u.min() >= 0
    assert u.max() < 1


def test_neighbours_that_repeat_each_other_are_seen():
    rng = np.random.default_rng(0)
    independent = rng.random(1000)
    assert abs(serial_correlation(independent, np.zeros(1000, int)).statistic) < 3
    repeated = np.repeat(independent, 2)  # every second pair has correlation 1: z = sqrt(n) / 2
    found = serial_correlation(repeated, np.zeros(2000, int))
    assert found.statistic == pytest.approx(np.sqrt(2000) / 2, rel=0.1)
    assert found.p_value < 1e-20


def test_no_pair_spans_two_outputs():
    rng = np.random.default_rng(0)
    pairs = np.repeat(rng.random(500), 2)  # each value twice, in two different outputs
    output = (np.arange(1000) + 1) // 2
    found = serial_correlation(pairs, output)
    assert found.n == 499
    assert abs(found.statistic) < 3
    assert serial_correlation(pairs, np.arange(1000)) is None


def test_a_token_too_rare_for_so_few_draws_is_seen():
    assert rarest_token(np.array([0.1, 0.7])).p_value == pytest.approx(1 - 0.9**2)
    assert rarest_token(np.array([1e-12, 0.7])).p_value == pytest.approx(2e-12)
    assert rarest_token(np.array([0.0, 0.7])).p_value == 0
    assert rarest_token(np.array([1.0 + 1e-7])).p_value == 1
