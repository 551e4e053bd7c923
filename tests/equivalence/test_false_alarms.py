"""On exact methods the certificate rejects no more often than its alpha says.

Holm's correction is conservative where tests depend on each other, as these do, so the number of
rejections has an upper limit only: the 99.9% quantile of a binomial with the nominal rate. The
p-values of single tests, which are not corrected, must be uniform.
"""

from collections import defaultdict

import pytest
from scipy import stats
from tiny_runs import Setting, decode, verdict_of

ALPHAS = (0.01, 0.1, 0.3)
SAFE = 0.999
CONTINUOUS = ("argmax", "draft top 1", "draft top 3", "log p", "pit", "pit serial")


def certificates(setting: Setting, seeds: int):
    """The tests of one certificate a seed."""
    for seed in range(seeds):
        yield verdict_of(decode(setting, seed), setting.workload(seed).prompt_ids()).tests


def check(setting: Setting, seeds: int) -> None:
    lowest: list[float] = []
    single: dict[str, list[float]] = defaultdict(list)
    for tests in certificates(setting, seeds):
        lowest.append(min(test.adjusted for test in tests))
        for test in tests:
            if test.stratum == "all" and test.test in CONTINUOUS:
                single[test.test].append(test.p_value)
    for alpha in ALPHAS:
        rejected = sum(p <= alpha for p in lowest)
        assert rejected <= stats.binom.ppf(SAFE, seeds, alpha), (alpha, sorted(lowest))
    assert len(single) >= 4
    for name, p_values in single.items():
        uniform = stats.kstest(p_values, "uniform")
        assert uniform.pvalue > (1 - SAFE) / len(single), (name, sorted(p_values))


def test_speculative_decoding_in_20_small_certificates():
    check(Setting("sd", prompts=24, repeats=1, max_new_tokens=12), seeds=20)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_200_certificates_of_each_method(method):
    options = (("lookahead", 3), ("budget", 3)) if method == "ssd" else ()
    check(Setting(method, prompts=24, repeats=1, max_new_tokens=32, options=options), seeds=200)
