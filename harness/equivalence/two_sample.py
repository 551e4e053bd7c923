"""Two samples of outputs, one distribution? For methods whose weights are not here.

Where the target cannot score an output (an endpoint), its outputs are set beside autoregressive
ones of a model that should be the same, on the same prompts and at the same temperature, by how
often each n-gram occurs. If both were drawn from one distribution, then which of a prompt's outputs
came from where is exchangeable: the labels are shuffled within each prompt, and the p-value is the
share of shufflings with a statistic at least as large (Phipson and Smyth 2010, never 0). No
assumption about the outputs is made, but far more of them are needed than the certificate needs
tokens. Valid only if both were drawn independently: with another seed, not with shared streams.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from harness.equivalence.hypothesis import TestOutcome, holm
from harness.equivalence.token_table import Group, groups_of, rows_of
from harness.errors import UsageError
from harness.greedy import ids_are_told
from harness.plan import BASELINE

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import RunData

SIZES = (1, 2, 3)  # n of the n-grams
PERMUTATIONS = 9999  # the smallest p-value is 1 / 10,000
_AT_ONCE = 100  # permutations per matrix product

Output = Sequence[int]
Samples = Mapping[Hashable, Sequence[Output]]


def compare_samples(
    ours: Samples, theirs: Samples, *, permutations: int = PERMUTATIONS, seed: int = 0
) -> tuple[TestOutcome, ...]:
    """Tests that both sides draw from one distribution: one test for each n of `SIZES`.

    The statistic is sum_g d_g^2 / c_g over the n-grams g, with d_g the difference of their mean
    counts per output, summed over the prompts, and c_g their count on both sides together.

    Args:
        ours: prompt -> its outputs.
        theirs: likewise; only prompts of both sides count.
        permutations: how often labels are shuffled.
        seed: of the shuffling.

    Returns:
        The tests, Holm-corrected; `n` is the number of outputs.

    Raises:
        UsageError: no prompt has outputs on both sides.
    """
    prompts = [prompt for prompt in ours if ours[prompt] and theirs.get(prompt)]
    if not prompts:
        raise UsageError("samples: no prompt with outputs on both sides; run the same dataset")
    outputs = [output for prompt in prompts for output in (*ours[prompt], *theirs[prompt])]
    sides = [(len(ours[prompt]), len(theirs[prompt])) for prompt in prompts]
    tests = [
        _permutation_test(size, _gram_counts(outputs, size), sides, permutations, seed)
        for size in SIZES
    ]
    adjusted = holm([test.p_value for test in tests])
    return tuple(replace(t, adjusted=float(p)) for t, p in zip(tests, adjusted, strict=True))


def compare_runs(run: RunData, baseline: RunData) -> dict[Group, tuple[TestOutcome, ...]]:
    """Each group of a run at temperature > 0 against the autoregressive outputs of another run.

    Raises:
        UsageError: the same seed in both, or nothing to compare.
    """
    if run.manifest["config"]["seed"] == baseline.manifest["config"]["seed"]:
        raise UsageError("--against: both runs have the same seed; make one with another --seed")
    found = {}
    for group in groups_of(run.requests):
        theirs = rows_of(baseline.requests, group._replace(method=BASELINE))
        ours = rows_of(run.requests, group)
        if group.temperature > 0 and len(theirs) and ids_are_told(ours):
            found[group] = compare_samples(_samples(ours), _samples(theirs))
    if not found:
        raise UsageError(f"--against: has no {BASELINE} outputs to compare known token ids with")
    return found


def _samples(requests: pd.DataFrame) -> Samples:
    grouped = requests.groupby(["dataset", "prompt_index"])["output_ids"]
    return {prompt: list(outputs) for prompt, outputs in grouped}


def _gram_counts(outputs: Sequence[Output], size: int) -> sparse.csr_array:
    """How often each n-gram occurs in each output: [outputs, n-grams]."""
    columns: dict[tuple[int, ...], int] = {}
    entries = [
        (row, columns.setdefault(gram, len(columns)))
        for row, output in enumerate(outputs)
        for gram in _grams(output, size)
    ]
    rows, cols = zip(*entries, strict=True) if entries else ((), ())
    shape = (len(outputs), max(1, len(columns)))
    return sparse.csr_array((np.ones(len(entries)), (rows, cols)), shape=shape)


def _grams(output: Output, size: int) -> Iterator[tuple[int, ...]]:
    return zip(*(output[start:] for start in range(size)), strict=False)


def _permutation_test(
    size: int,
    counts: sparse.csr_array,
    sides: Sequence[tuple[int, int]],
    permutations: int,
    seed: int,
) -> TestOutcome:
    signs = [np.repeat([1 / ours, -1 / theirs], (ours, theirs)) for ours, theirs in sides]
    scale = np.maximum(counts.sum(axis=0), 1)

    def statistics(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each column of weights [outputs, k]."""
        return np.asarray((((counts.T @ weights) ** 2) / scale[:, None]).sum(axis=0))

    observed = float(statistics(np.concatenate(signs)[:, None])[0])
    rng = np.random.default_rng(seed)
    least = observed * (1 - 1e-9) - 1e-12  # equal but for rounding counts as at least as large
    above = 0
    for first in range(0, permutations, _AT_ONCE):
        wanted = min(_AT_ONCE, permutations - first)
        shuffled = [rng.permuted(np.tile(own[:, None], wanted), axis=0) for own in signs]
        above += int((statistics(np.concatenate(shuffled)) >= least).sum())
    p_value = (1 + above) / (1 + permutations)
    return TestOutcome(f"{size}-grams", "all", counts.shape[0], observed, p_value)
