"""The shape of a decoder-only transformer, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.errors import ModelError

SUPPORTED = ("llama", "qwen2")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling (`rope_type: llama3`); wavelengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def apply(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Scales low frequencies by 1/factor, keeps high ones, blends between (Llama 3.1)."""
        wavelength = 2 * math.pi / inv_freq
        ratio = self.original_max_position / wavelength
        blend = (ratio - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * inv_freq / self.factor + blend * inv_freq


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Sizes and constants of a model; biases are seen from the weights themselves."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tied_head: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TransformerConfig:
        """Parses `config.json`, of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

        Raises:
            ModelError: an architecture or a kind of rotary scaling that the engine does not have.
        """
        model_type = str(config.get("model_type"))
        if model_type not in SUPPORTED:
            raise ModelError(
                f"model_type: {model_type!r} is not supported by the engine "
                f"(supported: {', '.join(SUPPORTED)})"
            )
        _refuse_variants(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        heads = int(config["num_attention_heads"])
        return cls(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope),
            max_position=int(config["max_position_embeddings"]),
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )

    def rope_tables(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Cosines and sines [2, max_position, head_dim] of Hugging Face's half-rotated layout."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inv_freq = 1.0 / self.rope_theta**exponent
        if self.rope_scaling is not None:
            inv_freq = self.rope_scaling.apply(inv_freq)
        angles = torch.outer(torch.arange(self.max_position, dtype=torch.float32), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return torch.stack((angles.cos(), angles.sin())).to(dtype=dtype, device=device)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act: {config['hidden_act']!r} is not supported (only silu)")
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window: sliding-window attention is not supported")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope_type: {kind!r} is not supported (only default and llama3)")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
