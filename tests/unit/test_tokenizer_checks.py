"""Tokenizers are compared by content; each refusal names the first difference."""

import json
from pathlib import Path

import pytest

from harness.errors import ModelError
from harness.tokenizer_checks import check_tokenizers, check_vocabulary

VOCAB = {"a": 0, "b": 1, "ab": 2}
ADDED = [{"id": 3, "content": "<end>", "special": True}]
MERGES = ["a b"]


def folder_with(
    folder: Path,
    vocab: dict[str, int] = VOCAB,
    added: list[dict[str, object]] = ADDED,
    merges: list[object] = MERGES,
    vocab_size: int = 8,
) -> Path:
    folder.mkdir()
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    content = {"version": folder.name, "added_tokens": added, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


@pytest.mark.parametrize(("target", "draft"), [(152064, 151936), (151936, 152064)])
def test_padded_embeddings_share_their_common_part(target, draft, tmp_path):
    ours = folder_with(tmp_path / "t", vocab_size=target)
    theirs = folder_with(tmp_path / "d", merges=[["a", "b"]], vocab_size=draft)
    assert check_tokenizers(ours, theirs) == 151936


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab": {"a": 0, "ab": 1, "b": 2}},
            "token 'ab' has id 2 in the target and 1 in the draft",
        ),
        ({"vocab": {"a": 0, "b": 1}}, "token 'ab' has id 2 in the target and none in the draft"),
        ({"vocab": {**VOCAB, "c": 5}}, "token 'c' has id none in the target and 5 in the draft"),
        (
            {"added": [{"id": 3, "content": "</s>"}]},
            "token '</s>' has id none in the target and 3 in the draft",
        ),
        ({"merges": ["b a"]}, "merge 0 is 'a b' in the target and 'b a' in the draft"),
        ({"merges": []}, "merge 0 is 'a b' in the target and None in the draft"),
        ({"vocab_size": 3}, "the smaller embedding has 3 rows but the tokenizer has id 3"),
    ],
)
def test_another_tokenizer_is_refused_at_the_first_difference(changes, message, tmp_path):
    target = folder_with(tmp_path / "t")
    with pytest.raises(ModelError, match=message):
        check_tokenizers(target, folder_with(tmp_path / "d", **changes))


def test_a_tokenizer_larger_than_its_own_embedding_is_refused(tmp_path):
    check_vocabulary(folder_with(tmp_path / "fits", vocab_size=4))
    with pytest.raises(
        ModelError, match=r"its embedding has 3 rows but its tokenizer has '<end>' at id 3"
    ):
        check_vocabulary(folder_with(tmp_path / "t", vocab_size=3))


def test_unreadable_tokenizer_is_named(tmp_path):
    target, draft = folder_with(tmp_path / "t"), folder_with(tmp_path / "d")
    (draft / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"/d: tokenizer\.json is malformed"):
        check_tokenizers(target, draft)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"/d: tokenizer\.json cannot be read"):
        check_tokenizers(target, draft)
