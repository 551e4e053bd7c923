"""A pair of made-up weights: folders with a config and a tokenizer, and nothing to download.

The config is that of a folder that is here, else one of the pair's declared shape. Prompts are cut
by the folder's own tokenizer where it has one, else by that of the `tiny` pair, whose ids every
larger vocabulary has; it cuts a text into two to three times as many tokens.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.decoder import Placement
from harness.errors import ModelError
from harness.memory import (
    DTYPE_BYTES,
    ModelNeed,
    Shape,
    available_memory,
    device_needs,
    model_need,
)
from harness.pairs import Model, Pair, ResolvedModel, ResolvedPair, local_folder

_TINY = Path(__file__).with_name("tiny") / "target"
_CONFIG = "config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_POSITIONS = 32768  # of a declared shape, which says nothing of them


def make_up(pair: Pair, cache_dir: Path) -> ResolvedPair:
    """The pair with folders in the cache that random weights can be made from.

    Raises:
        ModelError: neither a shape nor a config is known.
    """
    found = {role: _make_up(model, pair, cache_dir) for role, model in pair.models.items()}
    return ResolvedPair(
        pair.name, found["target"], found.get("draft"), pair.draft_vocab, pair.draft_quantization
    )


def check_memory(pair: ResolvedPair, context: int, batch_size: int, placement: Placement) -> None:
    """Raises `ModelError` unless the models fit what is free, before anything is allocated.

    Args:
        pair: what `make_up` gave.
        context: tokens of one sequence.
        batch_size: sequences at once.
        placement: which devices the models are on.
    """

    def need_of(model: ResolvedModel) -> ModelNeed:
        return model_need(Shape.of_folder(model.folder), model.dtype, context, batch_size)

    draft = need_of(pair.draft) if pair.draft else None
    for need in device_needs(need_of(pair.target), draft, available_memory(), placement):
        if not need.fits:
            raise ModelError(
                f"weights: {need.device} needs {need.need_bytes / 1e9:.1f} GB for {need.holds} of "
                f"{pair.name}, {need.available_bytes / 1e9:.1f} GB free; choose a smaller pair, "
                "batch or max_context"
            )


def config_of(shape: Shape) -> dict[str, Any]:
    """The `config.json` of the family that a shape belongs to: Qwen2, Qwen3 or else Llama."""
    family = "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama"
    return {
        "model_type": family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": _POSITIONS,
    }


def _make_up(model: Model, pair: Pair, cache_dir: Path) -> ResolvedModel:
    from impl.engine.loader import write_atomically

    source = local_folder(model)
    if source is None:
        config = json.dumps(config_of(model.known_shape()), indent=1)
    else:
        config = _read(source / _CONFIG)
    tokenizer = source if source and (source / _TOKENIZER[0]).is_file() else _TINY
    files = {name: _read(tokenizer / name) for name in _TOKENIZER} | {_CONFIG: config}
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()
    folder = cache_dir / "random" / digest
    for name, text in files.items():
        write_atomically(folder / name, text)
    parameters = Shape.of_folder(folder).parameters
    return ResolvedModel(
        folder=folder,
        sha256=digest,
        source=f"random weights of the shape of {source or f'pair {pair.name}'}",
        dtype=pair.dtype,
        parameters=parameters,
        weight_bytes=parameters * DTYPE_BYTES[pair.dtype],
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
