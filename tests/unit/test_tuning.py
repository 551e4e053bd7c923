"""What a search tries and spends, what it stores, and when a stored choice holds. No model."""

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from baselines.sd import SpeculativeOptions
from harness.config import RunConfig
from harness.decoder import Decoder, DecoderOptions, TuningGrid
from harness.decoder_pool import Method
from harness.errors import StoreError
from harness.statistics import Estimate
from harness.tuning.choices import (
    Candidate,
    Choice,
    Conditions,
    Setting,
    find,
    mismatch,
    read_choices,
    write_choice,
)
from harness.tuning.search import Rung, Search, candidates, plan_rung, rungs, thin_evidence
from harness.tuning.usage import use_choices
from impl.ssd.options import SaguaroOptions

PAIR: dict[str, Any] = {
    "name": "tiny",
    "target": {"source": "here", "sha256": "a", "dtype": "bfloat16"},
    "draft": {"source": "here", "sha256": "b", "dtype": "bfloat16"},
    "draft_vocab": None,
    "draft_quantization": "int4",
}
MACHINE = {
    "cpu": {"model": "x", "frequency_mhz": 1.0},
    "placement": {"target_cores": [0], "convention": "equal-target"},
    "load_average": 0.1,
}
POOLED = {"target_cores": [0], "convention": "pooled"}
HERE = Conditions(PAIR, MACHINE, frozenset({"e1", "e2"}))


class Options(DecoderOptions):
    tuning_grid: ClassVar[TuningGrid] = {"size": (1, 2, 3), "mode": ("a", "b")}

    size: int = 2
    mode: str = "a"
    note: str = ""


class Tunable(Decoder):
    Options = Options


class Plain(Decoder):
    pass


def test_a_method_is_automatic_where_it_chooses_all_of_its_grid_itself():
    assert SaguaroOptions().automatic
    assert SaguaroOptions(build="all").automatic
    assert not SaguaroOptions(budget=8).automatic
    assert not SpeculativeOptions().automatic
    assert not DecoderOptions().automatic  # there is nothing to choose


def choice(**fields: Any) -> Choice:
    evidence = Candidate(
        rung=0, options={"size": 3}, rounds=8, tokens_per_s=Estimate(9.5, 9.0, 10.0, 4), kept=True
    )
    defaults: dict[str, Any] = {
        "created": "2026-01-01T00:00:00+00:00", "command": ("harness", "tune"),
        "git": {"revision": None, "dirty": None}, "method": "sd", "temperature": 0.0,
        "batch_size": 1, "options": {"size": 3, "mode": "b"}, "fixed": {}, "budget": 10,
        "rounds": 8, "candidates": (evidence,), "runs": ("r",), "prompts": {"mini": ("t1", "t2")},
        "pair": PAIR, "fingerprint": MACHINE,
    }  # fmt: skip
    return Choice(**{**defaults, **fields})


def method(**given: Any) -> Method:
    return Method(Tunable, Options(**given), frozenset(given))


def test_candidates_are_the_defaults_then_every_other_combination():
    found = [tuple(point.values()) for point in candidates(method())]
    assert found[0] == (2, "a")
    assert sorted(found) == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b")]


def test_defaults_that_are_not_in_the_grid_are_tried_and_given_options_are_not_searched():
    assert candidates(method(mode="c")) == [{"size": 2}, {"size": 1}, {"size": 3}]
    assert candidates(method(size=9)) == [{"mode": "a"}, {"mode": "b"}]


def test_each_rung_keeps_a_third_until_one_is_left():
    assert [rungs(n) for n in (1, 2, 3, 4, 7, 12)] == [
        [1], [2], [3], [4, 2], [7, 3], [12, 4, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "prompts", "batch_size", "plan"),
    [
        (85, 12, 1, Rung(5, 1, 17)),  # 85 = 5 * 17
        (12, 12, 1, Rung(2, 1, 6)),  # two prompts, or there is no interval
        (1, 12, 1, Rung(1, 1, 1)),
        (800, 12, 1, Rung(12, 3, 22)),  # 66 rounds a prompt are three times 22
        (85, 40, 8, Rung(16, 1, 5)),  # the batch filled twice
    ],
)
def test_rounds_are_spread_over_prompts_before_they_make_outputs_longer(
    rounds, prompts, batch_size, plan
):
    assert plan_rung(rounds, prompts, batch_size) == plan
    assert plan.prompts * plan.repeats * plan.rounds_a_prompt <= rounds


@pytest.mark.parametrize(
    ("count", "batch_size", "enough", "share"),
    [
        (3, 1, 24, 23),  # one rung
        (14, 1, 336, 111),  # 14, 5 and 2 candidates: a third of the rounds is 112 = 14 * 8
        (14, 8, 2688, 895),  # eight sequences share them
    ],
)
def test_a_rung_of_fewer_than_8_rounds_a_candidate_is_warned_of(count, batch_size, enough, share):
    search = Search("sd", {}, 0.0, batch_size, enough)
    assert thin_evidence(search, count) is None
    warning = thin_evidence(replace(search, budget=enough - 1), count)
    assert warning == (
        f"sd (greedy, batch size {batch_size}): {count} candidates share {share} rounds in the "
        "first rung, fewer than 8 of a full batch each, which rank little; give "
        f"--rounds {enough}, or fewer candidates with --set"
    )


def test_a_choice_is_read_back_as_it_was_written_the_newest_first(tmp_path):
    older, newer = choice(), choice(created="2026-01-02T00:00:00+00:00", options={"size": 1})
    for each in (newer, older):
        write_choice(each, tmp_path / "tuned")
    assert read_choices(tmp_path / "tuned") == (newer, older)
    assert read_choices(tmp_path / "nothing") == ()
    assert find([newer, older], "sd", Setting(False, 1), HERE) == newer


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1}'])
def test_a_damaged_choice_names_its_file_and_the_fix(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(StoreError, match=r"bad\.json: .*tune again"):
        read_choices(tmp_path)


def with_(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**values, **changes}


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (HERE, None),
        (replace(HERE, pair=with_(PAIR, name="other")), None),
        (replace(HERE, pair=with_(PAIR, target=with_(PAIR["target"], source="x"))), None),
        (replace(HERE, fingerprint=with_(MACHINE, load_average=9)), None),
        (replace(HERE, pair=with_(PAIR, draft=with_(PAIR["draft"], sha256="c"))), "another pair"),
        (replace(HERE, pair=with_(PAIR, draft_quantization=None)), "draft_quantization"),
        (replace(HERE, pair=with_(PAIR, draft=None)), "another pair"),
        (replace(HERE, fingerprint=with_(MACHINE, cpu={"model": "y"})), "machine.*cpu.model"),
        (replace(HERE, fingerprint=with_(MACHINE, placement=POOLED)), "placement.convention"),
        (replace(HERE, prompts=frozenset({"e1", "t2"})), "prompts that this run measures"),
    ],
)  # fmt: skip
def test_a_choice_holds_for_its_pair_machine_and_placement_and_not_for_its_prompts(
    conditions, reason
):
    found = mismatch(choice(), conditions)
    if reason is None:
        assert found is None
    else:
        assert re.search(reason, found)


def used(choices: list[Choice], **given: Any):
    config = RunConfig(
        pair="tiny", methods=("sd", "ar"), temperatures=(0, 0.7, 1), batch_sizes=(1, 2)
    )
    methods = {"sd": method(**given), "ar": Method(Plain, DecoderOptions()), "sd:a": method()}
    return use_choices(methods, choices, config, HERE)


def test_a_run_takes_the_choices_of_its_settings_and_says_what_has_none():
    sampled = choice(temperature=1.0, options={"size": 1, "mode": "a"})
    found = used([choice(), sampled])
    assert {
        setting: tuned.options.size for setting, tuned in found.methods["sd"].tuned.items()
    } == {
        Setting(False, 1): 3,
        Setting(True, 1): 1,  # both temperatures above 0
    }
    assert found.choices == (choice(), sampled)
    assert found.unused == (
        "sd (greedy, batch size 2): never tuned",
        "sd (sampled, batch size 2): never tuned",
    )
    assert not found.methods["sd:a"].tuned  # a variant has the options given to it and no others


def test_given_options_win_one_by_one():
    tuned = used([choice()], mode="z").methods["sd"].tuned[Setting(False, 1)]
    assert (tuned.options.size, tuned.options.mode, tuned.names) == (3, "z", ("size",))
    assert not used([choice()], mode="z", size=7).methods["sd"].tuned


def test_a_choice_whose_options_are_no_longer_valid_is_not_used_and_said():
    found = used([choice(options={"length": 3})])
    assert not found.methods["sd"].tuned
    assert found.unused[0].startswith("sd (greedy, batch size 1): its tuned options are not valid")
