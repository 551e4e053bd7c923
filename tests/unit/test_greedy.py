"""Greedy outputs that differ from the autoregressive ones: position, gap, tie or failure."""

from typing import ClassVar

import pandas as pd

from harness.greedy import (
    Divergence,
    GreedyCheck,
    check_greedy,
    methods_with_own_kernels,
)

PROMPTS = {"mini/0/r0": (100, 101)}


class FixedReference:
    """Logits after [100, 101, 5, 6]: 3.00 for token 7, 2.75 for 8, 1.0 for 9; noise 0.5."""

    LOGITS: ClassVar[dict[int, float]] = {7: 3.0, 8: 2.75, 9: 1.0}

    def token_gap(self, ids, first, second):  # type: ignore[no-untyped-def]
        assert list(ids) == [100, 101, 5, 6]
        return abs(self.LOGITS[first] - self.LOGITS[second])

    def rounding_noise(self, prompt_ids, output_ids):  # type: ignore[no-untyped-def]
        assert tuple(prompt_ids) == (100, 101)
        assert list(output_ids) == [5, 6, 7]
        return 0.5

    def dtype_noise(self, prompt_ids, output_ids):  # type: ignore[no-untyped-def]
        assert (tuple(prompt_ids), list(output_ids)) == ((100, 101), [5, 6, 7])
        return 1.25


def frame(*rows: tuple[str, list[int], str]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "item": [f"{label}/mini/t0/b1/r0/k0" for label, _, _ in rows],
            "method": [label.removesuffix("@control") for label, _, _ in rows],
            "control": [label.endswith("@control") for label, _, _ in rows],
            "temperature": 0.0,
            "batch_size": 1,
            "request_id": "mini/0/r0",
            "output_ids": [ids for _, ids, _ in rows],
            "finish": [finish for _, _, finish in rows],
        }
    )


def check(*rows: tuple[str, list[int], str]) -> GreedyCheck:
    return check_greedy(frame(*rows), PROMPTS, FixedReference())


def test_a_method_with_own_kernels_is_allowed_the_noise_of_the_dtype_twice():
    # 9 instead of 7 is 2.0 away: above the engine's 0.5, within twice 1.25
    rows = frame(AR, ("sd", [5, 6, 9, 8], "length"), ("hf", [5, 6, 9, 8], "length"))
    found = check_greedy(rows, PROMPTS, FixedReference(), {"hf"})
    assert (found.threshold, found.kernel_threshold) == (0.5, 2.5)
    assert {d.item.split("/")[0]: d.tie for d in found.divergences} == {"sd": False, "hf": True}
    alone = check_greedy(frame(AR, ("hf", [5, 6, 9], "length")), PROMPTS, FixedReference(), {"hf"})
    assert (alone.threshold, alone.kernel_threshold) == (None, 2.5)


def test_tokens_that_no_server_told_are_not_compared():
    assert check(AR, ("endpoint", [-1, -1, -1, -1], "length")) == GreedyCheck(0, None, ())


def test_which_methods_have_own_kernels_is_in_the_manifest():
    entries = {"ar/mini/t0/b1": False, "hf:x/mini/t0/b1": True, "ar@control/mini/t0/b1": False}
    manifest = {"decoders": {cell: {"own_kernels": own} for cell, own in entries.items()}}
    assert methods_with_own_kernels(manifest) == {"hf:x"}
    assert methods_with_own_kernels({"decoders": {"sd/mini/t0/b1": {}}}) == frozenset()


AR = ("ar", [5, 6, 7, 8], "length")


def test_equal_outputs_need_no_reference() -> None:
    found = check(AR, ("ar@control", [5, 6, 7, 8], "length"), ("sd", [5, 6, 7, 8], "length"))
    assert found == GreedyCheck(compared=2, threshold=None, divergences=())


def test_a_gap_within_the_noise_is_a_tie_and_a_wider_one_is_not() -> None:
    found = check(AR, ("sd", [5, 6, 8, 8], "length"), ("ssd", [5, 6, 9, 8], "length"))
    assert found.threshold == 0.5
    assert found.divergences == (
        Divergence("sd/mini/t0/b1/r0/k0", "mini/0/r0", 2, 7, 8, gap=0.25, tie=True),
        Divergence("ssd/mini/t0/b1/r0/k0", "mini/0/r0", 2, 7, 9, gap=2.0, tie=False),
    )


def test_an_output_that_ends_too_early_is_a_failure() -> None:
    found = check(AR, ("sd", [5, 6], "length"))
    assert found.divergences == (
        Divergence("sd/mini/t0/b1/r0/k0", "mini/0/r0", 2, 7, None, gap=None, tie=False),
    )


def test_an_output_cut_by_the_context_is_compared_up_to_there() -> None:
    assert check(AR, ("sd", [5, 6], "context")).divergences == ()


def test_the_baseline_at_a_larger_batch_size_is_compared_with_its_smallest() -> None:
    rows = frame(AR, ("ar", [5, 6, 8, 8], "length"), ("sd", [5, 6, 8, 8], "length"))
    rows.loc[1:, "batch_size"] = 4
    rows.loc[1, "item"] = "ar/mini/t0/b4/r0/k0"
    found = check_greedy(rows, PROMPTS, FixedReference())
    assert found.compared == 2  # sd with the baseline at its own batch size, which it equals
    assert found.divergences == (
        Divergence("ar/mini/t0/b4/r0/k0", "mini/0/r0", 2, 7, 8, gap=0.25, tie=True),
    )


def test_sampled_outputs_and_other_batch_sizes_are_not_compared() -> None:
    rows = frame(AR, ("sd", [9, 9], "length"), ("ssd", [9, 9], "length"))
    rows.loc[1, "temperature"] = 1.0
    rows.loc[2, "batch_size"] = 4
    assert check_greedy(rows, PROMPTS, FixedReference()).compared == 0
