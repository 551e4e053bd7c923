"""One block of a transformer, built from a checkpoint's tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig
from impl.engine.operators import Attention, Linear, Norm, NormedResult, Operators

_NEVER_READ = ("rotary_emb.inv_freq", "lm_head.weight")  # computed, or tied to the embedding


@dataclass(frozen=True, slots=True)
class Layer:
    """The linear layers of a block, the norms in front of them, and its attention."""

    attention_norm: Norm | None
    qkv: Linear
    attention: Attention
    output: Linear
    mlp_norm: Norm | None
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Checkpoint:
    """A model's tensors, handed out in one dtype on one device, each checked by its shape."""

    tensors: Mapping[str, torch.Tensor]
    config: TransformerConfig
    dtype: torch.dtype
    device: torch.device
    _taken: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor; raises `ModelError` when it is missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"weights: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"weights: {name!r} is {list(tensor.shape)}, want {list(shape)}")
        self._taken.add(name)
        return tensor.to(device=self.device, dtype=self.dtype)

    def norm(self, name: str, size: int) -> Norm:
        """A norm; one with an offset has float32 weights, which the sum needs."""
        weight, offset = self.take(f"{name}.weight", size), self.config.family.norm_offset
        return Norm(weight.float() + offset if offset else weight, self.config.norm_eps)

    def linear(self, outputs: Mapping[str, int], width: int) -> torch.Tensor:
        """The weights [sum of outputs, width] of projections of one input, given by their size."""
        return torch.cat([self.take(f"{n}.weight", size, width) for n, size in outputs.items()])

    def bias(self, outputs: Mapping[str, int]) -> torch.Tensor | None:
        """Their biases [sum of outputs]; None where the checkpoint has none."""
        if not any(f"{name}.bias" in self for name in outputs):
            return None
        return torch.cat([self.take(f"{name}.bias", size) for name, size in outputs.items()])

    def refuse_unused(self) -> None:
        """Raises `ModelError` for a tensor that nothing took: the model is of another kind."""
        left = sorted(name for name in set(self.tensors) - self._taken
                      if not name.endswith(_NEVER_READ))  # fmt: skip
        if left:
            raise ModelError(
                f"weights: {left[0]!r} is no part of a {self.config.model_type} model as the lean "
                "engine knows it; `--engine hf` runs it through transformers"
            )


def build_layer(
    checkpoint: Checkpoint, index: int, rope: torch.Tensor, operators: Operators
) -> Layer:
    """Block `index` with the rotary tables [2, max_position, head_dim] of its attention."""
    config, prefix = checkpoint.config, f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp, norms = f"{prefix}self_attn.", f"{prefix}mlp.", config.family.norms

    def norm(name: str | None) -> Norm | None:
        return None if name is None else checkpoint.norm(prefix + name, hidden)

    def output(width: int, name: str, norm_after: str | None) -> Linear:
        sizes, after = {name: hidden}, norm(norm_after)
        linear = operators.output(checkpoint.linear(sizes, width), checkpoint.bias(sizes))
        return linear if after is None else NormedResult(linear, after)

    qkv = {f"{attention}q_proj": query, f"{attention}k_proj": key, f"{attention}v_proj": key}
    return Layer(
        norm(norms.before_attention),
        operators.linear(checkpoint.linear(qkv, hidden), checkpoint.bias(qkv)),
        _attention(checkpoint, index, attention, rope),
        output(query, f"{attention}o_proj", norms.after_attention),
        norm(norms.before_mlp),
        operators.gated(
            checkpoint.take(f"{mlp}gate_proj.weight", inner, hidden),
            checkpoint.take(f"{mlp}up_proj.weight", inner, hidden),
            config.family.activation,
        ),
        output(inner, f"{mlp}down_proj", norms.after_mlp),
    )


def _attention(checkpoint: Checkpoint, index: int, prefix: str, rope: torch.Tensor) -> Attention:
    config, kind = checkpoint.config, checkpoint.config.family.query_key_norm
    window = config.attention[index].window
    if kind is None:
        return Attention(rope, config.attention_scale, window)
    heads = (config.heads, config.kv_heads) if kind == "projection" else (1, 1)
    query_norm, key_norm = (
        checkpoint.norm(f"{prefix}{name}", count * config.head_dim)
        for name, count in zip(("q_norm", "k_norm"), heads, strict=True)
    )
    return Attention(rope, config.attention_scale, window, query_norm, key_norm)
