"""Which ids a trimmed draft head keeps; vocabularies and their hash are worked out by hand."""

import hashlib
import json

import numpy as np
import pytest

from harness.errors import ModelError, UsageError
from impl.engine import draft_vocab as module
from impl.engine.draft_vocab import Ranking, Vocabulary, draft_vocab, ranked_ids, rankings

# ids 0 to 2 are single bytes; 3 to 6 are merges; 7 and 8 are added; 9 is padding
VOCAB = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġa": 4, "abab": 5, "Ġab": 6, "[PAD9]": 9}
MERGES = [["a", "b"], ["Ġ", "a"], ["ab", "ab"], ["Ġa", "b"]]
ADDED = [{"content": "<eos>", "id": 7}, {"content": "<user>", "id": 8}]
SHA256 = hashlib.sha256(
    "0 a\n1 b\n2 Ġ\n3 ab\n4 Ġa\n5 abab\n6 Ġab\na b\nĠ a\nab ab\nĠa b\n".encode()
).hexdigest()


def write_tokenizer(folder, vocab=VOCAB, merges=MERGES, added=ADDED, kind="BPE"):
    content = {"added_tokens": added, "model": {"type": kind, "vocab": vocab, "merges": merges}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def toy_ranking(monkeypatch):
    ranking = Ranking("toy", SHA256, "by hand", 10, np.array([6, 2, 5], dtype=np.uint32))
    monkeypatch.setattr(module, "rankings", lambda: iter([ranking]))


class TestVocabulary:
    def test_sha256_is_of_bytes_and_merges_alone(self, tmp_path):
        vocabulary = Vocabulary.read(write_tokenizer(tmp_path))
        assert vocabulary == Vocabulary(size=10, always=(0, 1, 2, 7, 8), sha256=SHA256)

    def test_the_same_vocabulary_saved_another_way_has_the_same_sum(self, tmp_path):
        vocab = {token: VOCAB[token] for token in reversed(VOCAB) if token != "[PAD9]"}
        vocab["<eos>"] = 7
        folder = write_tokenizer(tmp_path, vocab, [" ".join(merge) for merge in MERGES])
        assert Vocabulary.read(folder).sha256 == SHA256

    def test_another_order_of_merges_is_another_vocabulary(self, tmp_path):
        folder = write_tokenizer(tmp_path, merges=MERGES[::-1])
        assert Vocabulary.read(folder).sha256 != SHA256

    @pytest.mark.parametrize("content", [None, "{oops", "[]", '{"added_tokens": []}'])
    def test_absent_or_invalid_file(self, tmp_path, content):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer\.json: (cannot be read|is no tokenizer)"):
            Vocabulary.read(tmp_path)


class TestDraftVocab:
    @pytest.mark.parametrize(
        ("size", "kept"),
        [
            (5, [0, 1, 2, 7, 8]),  # single bytes and added tokens
            (6, [0, 1, 2, 6, 7, 8]),  # + the most frequent; 2 is in already
            (7, [0, 1, 2, 5, 6, 7, 8]),
            (8, [0, 1, 2, 3, 5, 6, 7, 8]),  # + by id, behind the ranking
            (9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ],
    )
    def test_keeps_what_must_stay_then_by_rank_then_by_id(self, tmp_path, toy_ranking, size, kept):
        ids = draft_vocab(write_tokenizer(tmp_path), size)
        assert str(ids.dtype) == "torch.int64"
        assert ids.tolist() == kept

    @pytest.mark.parametrize("size", [10, 16384])
    def test_a_small_vocabulary_is_not_trimmed(self, tmp_path, size):
        assert draft_vocab(write_tokenizer(tmp_path), size) is None

    def test_no_room_for_what_must_stay(self, tmp_path, toy_ranking):
        with pytest.raises(
            UsageError, match="draft_vocab: must be at least 5 for this draft, got 4"
        ):
            draft_vocab(write_tokenizer(tmp_path), 4)

    @pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel"])
    def test_no_ranking_for_this_tokenizer(self, tmp_path, kind):
        vocab = [["a", -1.0]] * 10 if kind == "Unigram" else {f"t{i}": i for i in range(10)}
        folder = write_tokenizer(tmp_path, vocab, [], kind=kind)
        with pytest.raises(ModelError, match=r"draft_vocab: no token ranking .* qwen2\.5"):
            draft_vocab(folder, 5)
        assert draft_vocab(folder, 10) is None


class TestShipped:
    def test_form(self):
        (ranking,) = rankings()
        assert ranking.name == "qwen2.5"
        assert ranking.corpus_tokens > 10_000_000
        assert len(np.unique(ranking.ids)) == len(ranking.ids) >= 16384
        assert ranking.ids.max() < 151643  # the byte-pair vocabulary; added tokens lie behind
        assert len(ranking.to_bytes()) < 200_000

    def test_round_trip(self):
        ranking = Ranking("n", "0" * 64, "c", 3, np.array([70000, 1, 255], dtype=np.uint32))
        copy = Ranking.from_bytes(ranking.to_bytes())
        assert copy.ids.tolist() == [70000, 1, 255]
        assert (copy.name, copy.vocabulary_sha256, copy.corpus, copy.corpus_tokens) == (
            "n", "0" * 64, "c", 3,
        )  # fmt: skip

    def test_common_ids_rank_first(self):
        """Ids of " the", " of" and a blank line, in the GPT-4 order that Qwen follows."""
        (ranking,) = rankings()
        first = set(ranked_ids(ranking.vocabulary_sha256)[:300].tolist())
        assert {279, 315, 271} <= first
