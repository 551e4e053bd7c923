"""Prompts cut to numbers of tokens, from texts of the standard library, by the tiny tokenizer."""

import inspect
import json
import json.decoder
import textwrap

import pytest

from harness.dataset_registry import DatasetRegistry
from harness.encoding import encode_prompts
from harness.errors import DatasetError, UsageError
from harness.pairs import find_pair
from harness.prompts import load_prompts
from impl.engine.loader import load_tokenizer

LENGTHS = (64, 256, 1024)
TEXTS = [inspect.getsource(module) for module in (json.decoder, textwrap)] + ["A short text."]


def load(tmp_path, *texts, lengths=LENGTHS, **more):
    (tmp_path / "first-use.json").unlink(missing_ok=True)  # each call is a file of its own
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "x.jsonl").write_text(lines)
    entry = {
        "description": "d", "licence": "PSF", "category": "long", "cut": "text",
        "prompt": "Read: {text}\nSummarize it.", "lengths": list(lengths), **more,
        "sources": [{"kind": "mirror", "path": "x.jsonl"}],
    }  # fmt: skip
    registry = DatasetRegistry.model_validate({"datasets": {"long": entry}})
    return load_prompts("long", registry=registry, data_dir=tmp_path, cache_dir=tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find_pair("tiny").target.sources[0].path)


@pytest.mark.parametrize("template", [True, False])
def test_every_record_has_a_prompt_of_each_length(tmp_path, tokenizer, template):
    if template and not tokenizer.chat_template:
        tokenizer.chat_template = "<|{{ messages[0].content }}|>"
    found = load(tmp_path, *TEXTS)
    assert {(p.index, p.category) for p in found.prompts} == {
        (3 * row + k, label) for row in range(3) for k, label in enumerate(("64", "256", "1k"))
    }
    for prompt in encode_prompts(found, tokenizer, template=template):
        wanted = LENGTHS[prompt.index % 3]
        assert wanted - 3 <= len(prompt.ids) <= wanted
        text = tokenizer.decode(prompt.ids)
        assert "Read: " in text
        assert text.rstrip("|>").rstrip().endswith("Summarize it.") or template
        start = TEXTS[prompt.index // 3][:10]
        assert start in text  # the text loses its end, not its beginning


def test_all_lengths_of_a_text_are_on_one_side_of_the_split(tmp_path):
    rows = [
        {p.sha256 for p in load(tmp_path, *TEXTS).prompts if p.index // 3 == i} for i in range(3)
    ]
    assert [len(row) for row in rows] == [1, 1, 1]
    assert len(set.union(*rows)) == 3


def test_the_cut_is_the_same_every_time_and_lengths_take_turns(tmp_path, tokenizer):
    one, two = (encode_prompts(load(tmp_path, *TEXTS), tokenizer, template=False) for _ in "ab")
    assert one == two
    assert sorted(p.category for p in load(tmp_path, *TEXTS).prompts[:3]) == ["1k", "256", "64"]


def test_a_text_too_short_is_continued_by_the_next_and_too_little_text_is_told(tmp_path, tokenizer):
    found = load(tmp_path, "first. ", "second. " * 100, lengths=[64])
    first = next(p for p in found.prompts if p.index == 0)
    assert first.messages[0].content.startswith("Read: first. \n\nsecond. second. ")
    found = load(tmp_path, "tiny", lengths=[64])
    with pytest.raises(DatasetError, match="cannot have 64 tokens: its text is too short"):
        encode_prompts(found, tokenizer, template=False)
    found = load(tmp_path, "a " * 200, lengths=[16], prompt="x y " * 200 + "{text}")
    with pytest.raises(DatasetError, match="the template alone is longer"):
        encode_prompts(found, tokenizer, template=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"cut": None}, "belong together"), ({"lengths": []}, "belong together"),
     ({"prompt": "no field"}, "once"), ({"lengths": [3]}, "lengths")],
)  # fmt: skip
def test_entries_that_make_no_sense(tmp_path, change, named):
    from harness.dataset_registry import load_registry

    entry = {
        "description": "d", "licence": "PSF", "category": "long", "cut": "text",
        "prompt": "{text}", "lengths": [64], "sources": [{"kind": "mirror", "path": "x"}],
        **change,
    }  # fmt: skip
    path = tmp_path / "more.yaml"
    path.write_text(json.dumps({"datasets": {"long": entry}}))
    with pytest.raises(UsageError, match=named):
        load_registry(path)
