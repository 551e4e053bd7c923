"""Builds a Hugging Face tokenizer from the metadata of a GGUF file.

Supports byte-level BPE (`tokenizer.ggml.model` = gpt2) with the pre-tokenizers of the families
that the engine runs, and SentencePiece BPE (`llama`) with byte fallback: Llama 2, Mistral, Gemma.
Each is what the family's own `tokenizer.json` describes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "\u2581"  # how SentencePiece writes a space

# Words and punctuation as Qwen2 and Llama 3 split them; {digits} is what makes a number's piece.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """What is done to a text before BPE, and how BPE treats its pieces.

    Attributes:
        pattern: splits the text; None is GPT-2's own pattern.
        individual_digits: split each digit off first.
        nfc: bring the text to Unicode NFC first.
        ignore_merges: a piece that is a token stays whole.
        bos: a sequence starts with BOS unless the file says otherwise.
    """

    pattern: str | None = None
    individual_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(),
    "olmo": _PreTokenizer(),
    "dbrx": _PreTokenizer(pattern=_SPLIT.format(digits=r"\p{N}{1,3}")),
    "smollm": _PreTokenizer(individual_digits=True),
    "qwen2": _PreTokenizer(pattern=_SPLIT.format(digits=r"\p{N}"), nfc=True),
    "llama-bpe": _PreTokenizer(
        pattern=_SPLIT.format(digits=r"\p{N}{1,3}"), ignore_merges=True, bos=True
    ),
}
_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "<end_of_turn>",
)


def write(metadata: Mapping[str, Any], folder: Path, *, source: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `source` is named in errors.

    Unused ids (padding of the embedding) are left out, control tokens encode to one id each.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if model == "llama":
        tokenizer = _sentencepiece(metadata)
    elif model == "gpt2" and pre in _PRE_TOKENIZERS:
        tokenizer = _byte_level(metadata, _PRE_TOKENIZERS[pre])
    else:
        raise ModelError(
            f"{source}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported are 'llama', and 'gpt2' with {', '.join(_PRE_TOKENIZERS)}"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(metadata), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (all ids that end a turn or a text) and `pad_token_id`."""
    ids = {"bos_token_id": "bos", "pad_token_id": "padding"}
    found: dict[str, Any] = {
        key: metadata[f"tokenizer.ggml.{name}_token_id"]
        for key, name in ids.items()
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    return found | {"eos_token_id": _end_ids(metadata)}


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The declared end of sequence first, then the other well-known end tokens."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    declared = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [control.get(token) for token in _END_TOKENS]
    return list(dict.fromkeys(i for i in declared + known if i is not None))


def _byte_level(metadata: Mapping[str, Any], pre: _PreTokenizer) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    vocabulary = _vocabulary(metadata)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_tokens(tokenizer, metadata, bos=pre.bos)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE: pieces are merged best score first; what has no piece becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = _vocabulary(metadata)
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None
    )
    merges = _merges_by_score(vocabulary, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps, prefixed = [normalizers.Replace(" ", _SPACE)], _prefixes_space(metadata)
    if prefixed:
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    _add_tokens(tokenizer, metadata, bos=True)
    return tokenizer


def _prefixes_space(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _merges_by_score(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two, best piece first: the order in which they are merged."""
    pieces = sorted(vocabulary, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, bos: bool) -> None:
    """Control and user-defined tokens encode to one id each; BOS in front unless told otherwise."""
    from tokenizers import AddedToken, processors

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
            for i, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", bos):
        first = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )


def _pre_tokenizer(pre: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    if pre.individual_digits:
        first = pre_tokenizers.Digits(individual_digits=True)
    elif pre.pattern:
        first = pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated")
    else:
        return byte_level
    return pre_tokenizers.Sequence([first, byte_level])


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
    }
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if (i := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[key] = tokens[i]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
