"""The token ids that a draft's output head is trimmed to.

Most of a large vocabulary hardly ever occurs, yet the output head is most of a small draft's work.
Trimming the head to the ids that a corpus shows most often stays exact, because q is then the
distribution over those ids alone; all it can cost is acceptance, where the target wants another id.

A ranking belongs to a byte-pair vocabulary, known by the hash of its tokens and merges, so every
model with that vocabulary shares it. `scripts/count_draft_vocab.py` makes the shipped files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import ModelError, UsageError

if TYPE_CHECKING:
    import torch

_ID = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Token ids of one vocabulary, most frequent first.

    Attributes:
        name: of the vocabulary, for people.
        vocabulary_sha256: `Vocabulary.sha256` of the tokenizers that it fits.
        corpus: what was counted, in words.
        corpus_tokens: how many tokens that were.
        ids: uint32 [n], distinct; ids that are not listed rank behind these, by id.
    """

    name: str
    vocabulary_sha256: str
    corpus: str
    corpus_tokens: int
    ids: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        """The shipped form: gzip of one line of JSON, then the ids as little-endian uint32."""
        header = {key: getattr(self, key) for key in self.__slots__ if key != "ids"}
        content = json.dumps(header).encode() + b"\n" + self.ids.astype(_ID).tobytes()
        return gzip.compress(content, mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes) -> Ranking:
        """Reads what `to_bytes` wrote."""
        header, _, ids = gzip.decompress(content).partition(b"\n")
        return cls(**json.loads(header), ids=np.frombuffer(ids, dtype=_ID))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a `tokenizer.json` says of its tokens.

    Attributes:
        size: one more than the highest id.
        always: ids that no trimmed head may lack: every single byte (so single ASCII characters)
            and every added token (end of sequence, chat turns).
        sha256: of the byte-pair vocabulary, added tokens left out: the ids of the single bytes and
            of the merges' products, and the merges in order. None for another kind of tokenizer.
    """

    size: int
    always: tuple[int, ...]
    sha256: str | None

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Reads a model folder's `tokenizer.json`; raises `ModelError` without a valid one."""
        path = folder / "tokenizer.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            added = {token["content"]: token["id"] for token in content["added_tokens"]}
            return cls._from_model(content["model"], added)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: is no tokenizer file ({error!r})") from error

    @classmethod
    def _from_model(cls, model: Mapping[str, Any], added: Mapping[str, int]) -> Vocabulary:
        vocab = model["vocab"]  # token -> id, or a list of (token, score) in Unigram models
        ids = vocab if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        size = max([*ids.values(), *added.values()], default=-1) + 1
        if model["type"] != "BPE":
            return cls(size, tuple(sorted(added.values())), None)
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        single = {token: i for token, i in ids.items() if len(token) == 1 and token not in added}
        always = sorted({*single.values(), *added.values()})
        return cls(size, tuple(always), _bpe_sha256(ids, single, merges))


def rankings() -> Iterator[Ranking]:
    """Every shipped ranking."""
    for file in (resources.files("impl.engine") / "vocab_ranks").iterdir():
        if file.name.endswith(".gz"):
            yield Ranking.from_bytes(file.read_bytes())


def ranked_ids(vocabulary_sha256: str | None) -> NDArray[np.uint32]:
    """The shipped ranking of a vocabulary: uint32 [n], most frequent first.

    Raises:
        ModelError: none is shipped.
    """
    known = []
    for ranking in rankings():
        if ranking.vocabulary_sha256 == vocabulary_sha256:
            return ranking.ids
        known.append(ranking.name)
    raise ModelError(
        "draft_vocab: no token ranking for this tokenizer (there is one for "
        f"{', '.join(sorted(known))}); set draft_vocab to null"
    )


def draft_vocab(folder: Path, size: int) -> torch.Tensor | None:
    """The ids that a draft's head keeps.

    Args:
        folder: the draft, with its `tokenizer.json`.
        size: how many ids to keep.

    Returns:
        int64 [size], ascending; None when the vocabulary has no more than `size` ids.

    Raises:
        ModelError: no tokenizer there, or no ranking shipped for it.
        UsageError: `size` has no room for the ids that must always stay.
    """
    import torch

    vocabulary = Vocabulary.read(folder)
    if vocabulary.size <= size:
        return None
    always = np.array(vocabulary.always, dtype=np.int64)
    if size < len(always):
        raise UsageError(f"draft_vocab: must be at least {len(always)} for this draft, got {size}")
    ranked = ranked_ids(vocabulary.sha256).astype(np.int64)
    order = np.concatenate([always, ranked, np.arange(vocabulary.size)])
    _, first_seen = np.unique(order, return_index=True)
    return torch.from_numpy(np.sort(order[np.sort(first_seen)[:size]]))


def _bpe_sha256(ids: Mapping[str, int], single: Mapping[str, int], merges: list[list[str]]) -> str:
    digest = hashlib.sha256()
    tokens = {**single, **{left + right: ids[left + right] for left, right in merges}}
    for token, token_id in sorted(tokens.items(), key=lambda item: item[1]):
        digest.update(f"{token_id} {token}\n".encode())
    for left, right in merges:
        digest.update(f"{left} {right}\n".encode())
    return digest.hexdigest()
