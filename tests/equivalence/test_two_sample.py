import numpy as np
import pandas as pd
import pytest
from known_process import ARGMAX, TARGET, decode, toward
from scipy import stats

from harness.equivalence.two_sample import compare_runs, compare_samples
from harness.errors import UsageError
from harness.store import RunData


def samples(table, prompts, each, seed):
    """Outputs of the chain, `each` for every prompt."""
    tokens = decode(table, prompts * each, 30, seed)
    order = np.argsort(tokens.output, kind="stable")
    lengths = np.bincount(tokens.output[order], minlength=prompts * each)
    outputs = np.split(tokens.token[order], lengths.cumsum()[:-1])
    return {p: [o.tolist() for o in outputs[p * each : (p + 1) * each]] for p in range(prompts)}


def test_the_p_value_of_two_outputs_each_by_enumeration():
    # 6 ways to call two of four outputs "ours"; only the true one and its mirror image separate
    # them, so p is 1/3 for unigrams. Each output is one token long: there are no longer n-grams.
    unigrams, bigrams, trigrams = compare_samples({0: [[1], [1]]}, {0: [[2], [2]]})
    assert unigrams.p_value == pytest.approx(1 / 3, abs=0.02)
    # ours and theirs have one mean 1-gram count per output each: (1^2 + 1^2) / 2 of each
    assert unigrams.statistic == pytest.approx(1.0)
    assert (bigrams.p_value, trigrams.p_value) == (1.0, 1.0)
    assert unigrams.adjusted == pytest.approx(1.0, abs=0.06)


def test_labels_are_shuffled_within_a_prompt_only():
    # prompts differ, sides do not: nothing may be found
    ours = {p: [[p] * 5] * 3 for p in range(8)}
    assert all(test.p_value == 1 for test in compare_samples(ours, ours, permutations=99))


def test_two_exact_samplers_are_told_apart_at_the_false_alarm_rate():
    p_values = [
        compare_samples(
            samples(TARGET, 10, 4, seed), samples(TARGET, 10, 3, 10_000 + seed), permutations=199
        )[1].p_value
        for seed in range(150)
    ]
    alarms = int(np.sum(np.array(p_values) <= 0.05))
    low, high = stats.binom.interval(0.999, 150, 0.05)
    assert low <= alarms <= high


def test_a_bias_toward_the_argmax_is_seen():
    ours = samples(toward(TARGET, ARGMAX, 0.15), 40, 10, 1)
    found = compare_samples(ours, samples(TARGET, 40, 10, 2), permutations=999)
    assert min(test.adjusted for test in found) <= 0.01


def test_a_prompt_of_one_side_only_is_left_out():
    found = compare_samples({0: [[1]], 1: [[2]]}, {0: [[1]]}, permutations=9)
    assert found[0].n == 2
    with pytest.raises(UsageError, match="no prompt with outputs on both sides"):
        compare_samples({0: [[1]]}, {1: [[1]]})


def test_runs_that_share_their_random_streams_are_refused():
    run = RunData({"config": {"seed": 3}}, pd.DataFrame(), pd.DataFrame())
    with pytest.raises(UsageError, match="same seed"):
        compare_runs(run, run)
