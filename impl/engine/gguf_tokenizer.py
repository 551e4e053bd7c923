"""Builds a Hugging Face tokenizer from the metadata of a GGUF file.

Supports byte-level BPE (`tokenizer.ggml.model` = gpt2) with the pre-tokenizers of the families
that the engine runs. Each is what the family's own `tokenizer.json` describes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

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
    "smollm": _PreTokenizer(individual_digits=True),
    "qwen2": _PreTokenizer(pattern=_SPLIT.format(digits=r"\p{N}"), nfc=True),
    "llama-bpe": _PreTokenizer(
        pattern=_SPLIT.format(digits=r"\p{N}{1,3}"), ignore_merges=True, bos=True
    ),
}
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")


def write(metadata: Mapping[str, Any], folder: Path, *, source: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `source` is named in errors.

    Unused ids (padding of the embedding) are left out, control tokens encode to one id each.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{source}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported is 'gpt2' with {', '.join(_PRE_TOKENIZERS)}"
        )
    _build(metadata, _PRE_TOKENIZERS[pre]).save(str(folder / "tokenizer.json"))
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


def _build(metadata: Mapping[str, Any], pre: _PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
            for i, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if metadata.get("tokenizer.ggml.add_bos_token", pre.bos):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


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
