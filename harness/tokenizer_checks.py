"""Whether a model's tokenizer fits its embedding, and a draft's tokenizer its target's.

Decided by content: the tokens with their ids, added (special) ones included, and the merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from harness.errors import ModelError


def check_vocabulary(folder: Path) -> None:
    """Checks that a model embeds every id of its tokenizer.

    Raises:
        ModelError: the embedding is smaller than the tokenizer, or there is no tokenizer.
    """
    ids, rows = _parse_tokenizer(folder, _tokenizer_text(folder)).ids, _vocab_size(folder)
    token, largest = max(ids.items(), key=lambda item: item[1])
    if largest >= rows:
        raise ModelError(
            f"{folder}: its embedding has {rows} rows but its tokenizer has {token!r} at id "
            f"{largest}; fetch the tokenizer that the model was trained with"
        )


def check_tokenizers(target_folder: Path, draft_folder: Path) -> int:
    """Checks that two models cut text into the same token ids, by content and not by name.

    Returns:
        Size of the common vocabulary: ids below it exist in both models. Embeddings that are
        padded to different sizes are fine.

    Raises:
        ModelError: tokens or merges differ (the first difference is named), or an embedding is
            smaller than the tokenizer.
    """
    texts = _tokenizer_text(target_folder), _tokenizer_text(draft_folder)
    target = _parse_tokenizer(target_folder, texts[0])
    if texts[0] != texts[1]:
        draft = _parse_tokenizer(draft_folder, texts[1])
        _compare_tokens(target.ids, draft.ids)
        _compare_merges(target.merges, draft.merges)
    common = min(_vocab_size(target_folder), _vocab_size(draft_folder))
    if (largest := max(target.ids.values())) >= common:
        raise ModelError(
            f"draft and target: the smaller embedding has {common} rows but the tokenizer has id "
            f"{largest}; use models that were trained with one tokenizer"
        )
    return common


@dataclass(frozen=True)
class _Tokenizer:
    """What decides into which ids a text is cut.

    Attributes:
        ids: token -> id, added (special) tokens included.
        merges: "left right" in order of rank.
    """

    ids: Mapping[str, int]
    merges: Sequence[str]


def _tokenizer_text(folder: Path) -> bytes:
    try:
        return (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelError(f"{folder}: tokenizer.json cannot be read ({error.strerror})") from error


def _parse_tokenizer(folder: Path, text: bytes) -> _Tokenizer:
    try:
        content = json.loads(text)
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] in order of id
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
        return _Tokenizer({**vocabulary, **added}, merges)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}: tokenizer.json is malformed; fetch the model again") from error


def _compare_tokens(target: Mapping[str, int], draft: Mapping[str, int]) -> None:
    differing = {token for token, _ in target.items() ^ draft.items()}
    if not differing:
        return

    def first_id(token: str) -> int:
        return min(ids[token] for ids in (target, draft) if token in ids)

    token = min(differing, key=lambda token: (first_id(token), token))
    raise ModelError(
        f"draft: its tokenizer is not the target's: token {token!r} has id "
        f"{target.get(token, 'none')} in the target and {draft.get(token, 'none')} in the draft; "
        "choose a draft of the target's family"
    )


def _compare_merges(target: Sequence[str], draft: Sequence[str]) -> None:
    for rank, (ours, theirs) in enumerate(zip_longest(target, draft)):
        if ours != theirs:
            raise ModelError(
                f"draft: its tokenizer is not the target's: merge {rank} is {ours!r} in the target "
                f"and {theirs!r} in the draft; choose a draft of the target's family"
            )


def _vocab_size(folder: Path) -> int:
    from impl.engine import loader

    return loader.model_size(folder, "vocab_size")
