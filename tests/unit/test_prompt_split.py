"""No prompt is tuned on and evaluated, however prompts are picked, ordered or duplicated."""

import json
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import DatasetError
from harness.prompt_split import holds, prompt_sha256, side_of
from harness.prompts import load_prompts

WORDS = st.lists(st.text("abcäß \n\t", max_size=6), min_size=1, max_size=40)


def own_file(folder: str | Path, texts: list[str]) -> str:
    path = Path(folder) / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def words_of(name: str, count: int | None, seed: int, split: str) -> set[tuple[str, ...]]:
    try:
        found = load_prompts(name, count, seed=seed, split=split)
    except DatasetError:  # nothing on this side
        return set()
    return {tuple(prompt.messages[0].content.split()) for prompt in found.prompts}


@settings(deadline=None, max_examples=40)
@given(WORDS, st.randoms(), st.integers(0, 3), st.integers(0, 3), st.none() | st.integers(1, 9))
def test_no_choice_of_prompts_brings_a_tuning_prompt_into_an_evaluation(
    texts, random, seed, other_seed, count
):
    """Neither another order nor a subset, seed or layout of the words does."""
    shuffled = [f" {text}\n" for text in random.sample(texts, len(texts))]
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        tuned = words_of(own_file(one, texts), None, seed, "tuning")
        evaluated = words_of(own_file(two, shuffled), count, other_seed, "evaluation")
    assert not tuned & evaluated


@given(WORDS)
def test_every_prompt_is_on_exactly_one_side(texts):
    sha = prompt_sha256(texts)
    assert [holds("evaluation", sha), holds("tuning", sha)].count(True) == 1
    assert holds("all", sha)


def test_one_in_five_by_the_first_eight_bytes_of_the_sum():
    sides = [side_of(f"{number:016x}" + 48 * "0") for number in range(10)]
    assert sides == ["tuning", *4 * ["evaluation"]] * 2
    assert prompt_sha256([" one\n two", "three "]) == sha256(b"one two\nthree").hexdigest()


def test_mini_has_nine_prompts_of_each_category_to_evaluate_and_three_to_tune_on():
    for split, each in (("evaluation", 9), ("tuning", 3)):
        found = load_prompts("mini", split=split)
        categories = [prompt.category for prompt in found.prompts]
        assert {name: categories.count(name) for name in categories} == dict.fromkeys(
            ("chat", "math", "code", "summarising"), each
        )
        assert found.available == 4 * each
        assert found.sha256 == load_prompts("mini").sha256


@pytest.mark.parametrize("split", ["evaluation", "tuning"])
def test_the_first_eight_of_a_split_are_the_eight(split):
    assert (
        load_prompts("mini", 8, seed=1, split=split).prompts
        == (load_prompts("mini", 12, seed=1, split=split).prompts[:8])
    )


def test_a_file_that_is_all_tuning_says_how_to_use_it(tmp_path):
    tuning = next(
        t for t in map(str, range(99)) if side_of(sha256(t.encode()).hexdigest()) == "tuning"
    )
    path = own_file(tmp_path, [tuning])
    with pytest.raises(
        DatasetError, match=r"none of its 1 prompts is in the evaluation.*--split all"
    ):
        load_prompts(path, split="evaluation")
    assert load_prompts(path, split="all").available == 1
