"""The operators a transformer layer is made of, on PyTorch alone: the portable backend.

A backend builds its linear layers once from plain weights (packing or quantising as it likes) and
runs the rest without knowing the model. `TorchOperators` runs everywhere and is the numerical
reference of the others; on CPUs in bfloat16 it packs linear weights once for oneDNN, since
`torch.nn.functional.linear` would reorder them at every call.
"""

from __future__ import annotations

import abc
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F

from impl.engine.architecture import Activation
from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import Segment, TokenBatch


class Norm(NamedTuple):
    """A root-mean-square norm: weight [features] and epsilon; computed in the weight's dtype."""

    weight: torch.Tensor
    eps: float


class Attention(NamedTuple):
    """What one layer's attention has of its own.

    Attributes:
        rope: cosines and sines [2, max_position, head_dim].
        scale: what scores are multiplied with before the softmax.
        window: how many tokens a token sees, itself included; None is all.
        query_norm, key_norm: applied before the rotation, to as many adjacent features as they have
            weights: those of one head or of all of them.
    """

    rope: torch.Tensor
    scale: float
    window: int | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class Linear(Protocol):
    """y = norm(x) W^T + b (+ residual), x [N, in] -> y [N, out]."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that one call reads of the weights."""

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Applies the layer; the norm comes first, the residual is added last."""


class Operators(Protocol):
    """A backend.

    Attributes:
        name: in manifests.
        batch_invariant: whether a row's results have the same bits whatever the other rows.
    """

    name: str
    batch_invariant: bool

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer of weight [out, in] and bias [out]."""

    def output(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """The layer that ends half a block: its results join the residual stream."""

    def head(self, weight: torch.Tensor) -> Linear:
        """The output head: a layer without bias whose results are float32."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> Linear:
        """activation(x G^T) * (x U^T) as one layer."""

    def attention(
        self, qkv: torch.Tensor, how: Attention, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """Normalises and rotates q and k, writes k and v to the cache, attends.

        Args:
            qkv: [N, (heads + 2 kv_heads) * head_dim], query heads first, then keys, then values.
            how: what this layer's attention has of its own.
            batch: where the N rows belong.
            cache: read and written at `layer`.
            layer: index of the layer.

        Returns:
            [N, heads * head_dim].
        """


class AddedResidual(abc.ABC):
    """A `Linear` without a kernel of its own for the residual."""

    weight_bytes: int

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.product(x, norm)
        return y if residual is None else y + residual

    @abc.abstractmethod
    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """norm(x) W^T + b."""


class TorchLinear(AddedResidual):
    """`torch.nn.functional.linear` on plain weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return F.linear(normalised(x, norm), self.weight, self.bias)


class OneDnnLinear:
    """A CPU bfloat16 layer whose weight oneDNN has packed once, with the residual fused in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight_bytes = weight.numel() * weight.element_size()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = normalised(x, norm)
        if residual is None:
            y = torch.ops.mkldnn._linear_pointwise.default(
                x, self.packed, self.bias, "none", [], ""
            )
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.packed, self.bias, "add"
            )
        return cast("torch.Tensor", y)


class Float32Result(AddedResidual):
    """A layer whose results are widened to float32."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.weight_bytes = linear.weight_bytes

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return self.linear(x, norm=norm).float()


class NormedResult(AddedResidual):
    """A layer whose results are normalised before the residual is added."""

    def __init__(self, linear: Linear, norm: Norm) -> None:
        self.linear, self.norm = linear, norm
        self.weight_bytes = linear.weight_bytes

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return normalised(self.linear(x, norm=norm), self.norm)


class TorchGated(AddedResidual):
    """Gate and up projections as one layer, then activation(gate) * up."""

    def __init__(self, gate_up: Linear, activation: Activation) -> None:
        self.gate_up, self.activation = gate_up, activation
        self.weight_bytes = gate_up.weight_bytes

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return gated(self.gate_up(x, norm=norm), self.activation)


class TorchOperators:
    """The portable backend, on any device and dtype."""

    name = "torch"
    batch_invariant = False

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.linear`."""
        on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if on_cpu and weight.dtype == torch.bfloat16:
            return OneDnnLinear(weight, bias)
        return TorchLinear(weight, bias)

    def output(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.output`."""
        return self.linear(weight, bias)

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Operators.head`."""
        return Float32Result(self.linear(weight, None))

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> Linear:
        """See `Operators.gated`."""
        return TorchGated(self.linear(torch.cat((gate, up)), None), activation)

    def attention(
        self, qkv: torch.Tensor, how: Attention, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """See `Operators.attention`."""
        kv_heads, head_dim = cache.memory.shape[3], cache.memory.shape[5]
        qkv = qkv.view(qkv.shape[0], -1, head_dim)
        unrotated, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        if how.query_norm is not None or how.key_norm is not None:
            query, key = unrotated[:, :-kv_heads], unrotated[:, -kv_heads:]
            normed = normalised_heads(query, how.query_norm), normalised_heads(key, how.key_norm)
            unrotated = torch.cat(normed, dim=1)
        rotated = rotate(unrotated, how.rope[:, batch.positions])
        query, key = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        output, row = torch.empty_like(query), 0
        for segment in batch.segments:
            rows = slice(row, row + segment.count)
            memory = cache.memory[layer, :, segment.slot, :, : segment.end]
            memory[0, :, segment.start :] = key[rows].transpose(0, 1)
            memory[1, :, segment.start :] = value[rows].transpose(0, 1)
            mask = _additive_mask(segment, how.window, qkv)
            output[rows] = _attend(query[rows], memory, mask, how.scale)
            row += segment.count
        return output.view(len(output), -1)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, of [N, 2 * inner] -> [N, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up)


def normalised(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    weight = norm.weight
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, norm.eps).to(x.dtype)


def normalised_heads(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Normalises x [N, heads, head_dim] by heads, or all heads together: see `Attention`."""
    if norm is None:
        return x
    return normalised(x.reshape(len(x), -1, len(norm.weight)), norm).view(x.shape)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [N, heads, head_dim] by the tables' rows [2, N, head_dim]."""
    cos, sin = rope.unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)


def _attend(
    query: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of query [n, heads, D] over memory [2, kv_heads, cells, D]; mask [n, cells].

    The query heads that share a key head are folded into the query length: at a few tokens this is
    several times faster than repeating the keys.
    """
    count, heads, head_dim = query.shape
    kv_heads = memory.shape[1]
    group = heads // kv_heads
    folded = query.view(count, kv_heads, group, head_dim).transpose(0, 1)
    folded = folded.reshape(1, kv_heads, count * group, head_dim)
    if mask is not None:
        mask = mask.repeat_interleave(group, dim=0)
    output = F.scaled_dot_product_attention(
        folded, memory[None, 0], memory[None, 1], mask, scale=scale
    )
    return output.view(kv_heads, count, group, head_dim).transpose(0, 1).reshape(query.shape)


def _additive_mask(segment: Segment, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """The segment's mask [count, end], 0 where visible and -inf elsewhere; None hides nothing."""
    hides_nothing = segment.tail_mask is None and segment.count == 1
    if hides_nothing and (window is None or segment.end <= window):
        return None
    mask = torch.zeros(segment.count, segment.end, dtype=like.dtype)
    mask.masked_fill_(~segment.visible(window), float("-inf"))
    return mask.to(like.device)
