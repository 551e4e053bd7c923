"""Shapes of the models that are timed, as `config.json` tells them; weights are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from impl.engine.models import ModelSpec
from impl.engine.synthetic_model import Coin

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
LLAMA_1B = _LLAMA | {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_8B = _LLAMA | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
TINY_DRAFT = _LLAMA | {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
TINY_TARGET = TINY_DRAFT | {"num_hidden_layers": 2}


class Pair(NamedTuple):
    """A target and a draft, and what they are called."""

    names: tuple[str, str]
    target: ModelSpec
    draft: ModelSpec


def make_pair(folder: Path, device: str, *, tiny: bool, acceptance: float) -> Pair:
    """Writes the configs of a pair; a coin decides which drafted tokens are accepted."""
    configs = {"tiny 2": TINY_TARGET, "tiny 1": TINY_DRAFT}
    if not tiny:
        configs = {"8B": LLAMA_8B, "1B": LLAMA_1B}
    specs = []
    for (name, config), role in zip(configs.items(), ("target", "draft"), strict=True):
        own = folder / name.replace(" ", "-")
        own.mkdir()
        (own / "config.json").write_text(json.dumps(config), encoding="utf-8")
        letters = range(min(4096, config["vocab_size"]))
        coin = Coin(acceptance, 1.0, 0, letters, role)
        specs.append(ModelSpec(own, "bfloat16", random=True, coin=coin, device=device))
    return Pair(tuple(configs), *specs)
