"""The shape of a decoder-only transformer, read from a Hugging Face `config.json`.

What sets a family apart from Llama is data here (`FAMILIES`, and what the config says of each
layer's attention), so that the layers of `transformer` know no family by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from harness.errors import ModelError

Activation = Literal["silu", "gelu_tanh"]
_OTHER_ENGINE = "`--engine hf` runs it through transformers"
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class BlockNorms(NamedTuple):
    """Names of the norms around the two halves of a block; None where there is none.

    A norm `before` is applied to the input of a half, one `after` to its output, ahead of the
    residual sum.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_BEFORE = BlockNorms("input_layernorm", None, "post_attention_layernorm", None)
_AFTER = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = BlockNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one `model_type` differ from Llama.

    Attributes:
        norms: where the norms of a block are.
        query_key_norm: rotary queries and keys are normalised before, each "head" by itself or the
            whole "projection" at once.
        norm_offset: a norm multiplies by this plus its stored weight.
        scaled_embedding: embeddings are multiplied by the square root of the hidden size.
        activation: of the gate.
        windowed: where the config says nothing of its layers, which have a sliding window: "all",
            those from `max_window_layers` on if `use_sliding_window` is set ("late"), or all but
            every `sliding_window_pattern`-th ("pattern").
        head_dim, window, rope_theta: what a config that leaves them out means; None is the quotient
            of hidden size and heads, and no window.
        local_rope_theta: of the layers with a window; None is the same as of the others.
    """

    norms: BlockNorms = _BEFORE
    query_key_norm: Literal["head", "projection"] | None = None
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    activation: Activation = "silu"
    windowed: Literal["none", "all", "late", "pattern"] = "none"
    head_dim: int | None = None
    window: int | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(windowed="all", window=4096),
    "qwen2": Family(windowed="late", window=4096),
    "qwen3": Family(query_key_norm="head", windowed="late", window=4096, head_dim=128),
    "gemma3_text": Family(
        norms=_AROUND,
        query_key_norm="head",
        norm_offset=1.0,
        scaled_embedding=True,
        activation="gelu_tanh",
        windowed="pattern",
        head_dim=256,
        window=4096,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
    ),
    "olmo2": Family(norms=_AFTER, query_key_norm="projection"),
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by one factor (`rope_type: linear`)."""

    factor: float

    def apply(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Scales every frequency by 1/factor."""
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
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
class Rope:
    """Rotary embedding: base of the frequencies and their scaling."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None

    def table(
        self, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Cosines and sines [2, positions, head_dim] of Hugging Face's half-rotated layout."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq = 1.0 / self.theta**exponent
        if self.scaling is not None:
            inv_freq = self.scaling.apply(inv_freq)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return torch.stack((angles.cos(), angles.sin())).to(dtype=dtype, device=device)


class LayerAttention(NamedTuple):
    """What one layer's attention has of its own.

    Attributes:
        rope: its rotary embedding.
        window: how many tokens a token sees, itself included; None is all.
    """

    rope: Rope
    window: int | None


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Sizes and constants of a model; biases are seen from the weights themselves.

    Attributes:
        family: what it has in common with the other models of its type.
        attention: of each layer.
        attention_scale: what scores are multiplied with before the softmax.
    """

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[LayerAttention, ...]
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float
    max_position: int
    tied_head: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TransformerConfig:
        """Parses `config.json`, of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

        Raises:
            ModelError: an architecture or a variant of one that the engine does not have.
        """
        model_type = str(config.get("model_type"))
        family = FAMILIES.get(model_type)
        if family is None:
            raise ModelError(
                f"model_type: {model_type!r} is not supported by the lean engine (supported: "
                f"{', '.join(FAMILIES)}); {_OTHER_ENGINE}"
            )
        _refuse_variants(config, family)
        heads = int(_given(config, "num_attention_heads"))
        default_head_dim = family.head_dim or int(_given(config, "hidden_size")) // heads
        head_dim = int(config.get("head_dim") or default_head_dim)
        return cls(
            model_type=model_type,
            family=family,
            vocab_size=int(_given(config, "vocab_size")),
            hidden_size=int(_given(config, "hidden_size")),
            intermediate_size=int(_given(config, "intermediate_size")),
            attention=_layers(config, family),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            attention_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            norm_eps=float(_given(config, "rms_norm_eps")),
            max_position=int(_given(config, "max_position_embeddings")),
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.attention)


def _given(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise ModelError(f"config.json: lacks {name}; fetch the model again")
    return value


def _refuse_variants(config: Mapping[str, Any], family: Family) -> None:
    name = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    activation = config.get(name)
    if activation is not None and _ACTIVATIONS.get(activation) != family.activation:
        raise ModelError(
            f"{name}: {activation!r} is not supported for {config['model_type']} "
            f"(only {family.activation}); {_OTHER_ENGINE}"
        )
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "mlp_bias",
    ):
        if config.get(name):
            raise ModelError(
                f"{name}: {config[name]} is not supported by the lean engine; {_OTHER_ENGINE}"
            )


def _layers(config: Mapping[str, Any], family: Family) -> tuple[LayerAttention, ...]:
    """Each layer's attention, by what the config says of it or else by its family's rule."""
    window = config.get("sliding_window", family.window)
    plain, local = _ropes(config, family)
    kinds = config.get("layer_types") or [
        "sliding_attention" if windowed else "full_attention"
        for windowed in _windowed(config, family)
    ]
    known = {
        "full_attention": LayerAttention(plain, None),
        "sliding_attention": LayerAttention(local, None if window is None else int(window)),
    }
    if family.windowed == "all":  # whatever the layers are called: the family knows one kind
        return (known["sliding_attention"],) * int(_given(config, "num_hidden_layers"))
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(
            f"layer_types: {unknown[0]!r} is not supported by the lean engine; {_OTHER_ENGINE}"
        )
    return tuple(known[kind] for kind in kinds)


def _windowed(config: Mapping[str, Any], family: Family) -> list[bool]:
    layers = range(int(_given(config, "num_hidden_layers")))
    if family.windowed == "pattern":
        pattern = int(config.get("sliding_window_pattern", 6))
        return [(layer + 1) % pattern != 0 for layer in layers]
    if family.windowed == "late" and config.get("use_sliding_window"):
        return [layer >= int(config.get("max_window_layers", 28)) for layer in layers]
    return [family.windowed == "all" for _ in layers]


def _ropes(config: Mapping[str, Any], family: Family) -> tuple[Rope, Rope]:
    """The rotary embeddings of the layers without and with a window."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = "full_attention" in given or "sliding_attention" in given
    theta = float(config.get("rope_theta") or family.rope_theta)
    plain = _rope(given.get("full_attention") or {} if by_kind else given, theta)
    if family.local_rope_theta is None:
        return plain, plain
    theta = float(config.get("rope_local_base_freq") or family.local_rope_theta)
    return plain, _rope(given.get("sliding_attention") or {} if by_kind else {}, theta)


def _rope(given: Mapping[str, Any], theta: float) -> Rope:
    theta = float(given.get("rope_theta") or theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    match kind:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, LinearScaling(float(_given(given, "factor"))))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(_given(given, "factor")),
                low_freq_factor=float(_given(given, "low_freq_factor")),
                high_freq_factor=float(_given(given, "high_freq_factor")),
                original_max_position=int(_given(given, "original_max_position_embeddings")),
            )
            return Rope(theta, scaling)
    raise ModelError(
        f"rope_type: {kind!r} is not supported by the lean engine (supported: default, linear, "
        f"llama3); {_OTHER_ENGINE}"
    )
