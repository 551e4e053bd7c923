"""Which operators a model runs on: the fused CPU kernels where they can be built, else PyTorch's.

On GPUs: `gpu_operators`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from impl.engine.architecture import Activation, TransformerConfig
from impl.engine.cpu_kernels import CpuKernels, PackedLinear, Quantization
from impl.engine.kv_cache import KVCache
from impl.engine.operators import Attention, Linear, Norm, Operators, TorchOperators
from impl.engine.token_batch import TokenBatch

HEAD_DIM_STEP = 32  # elements that one step of the attention kernel takes


class KernelLinear:
    """A layer of the fused kernels, called as the transformer calls it."""

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed
        self.weight_bytes = packed.weight_bytes

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if norm is None:
            return self._packed(x, residual=residual)
        return self._packed(x, norm_weight=norm.weight, eps=norm.eps, residual=residual)


class KernelOperators:
    """Bfloat16 activations on AVX512 or AMX; rows never affect each other."""

    batch_invariant = True

    def __init__(self, kernels: CpuKernels, quantization: Quantization | None) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self.name = f"cpu-kernels-{'amx-' if kernels.amx else ''}{quantization or 'bf16'}"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.linear`."""
        return KernelLinear(self._kernels.pack(weight, bias, quantization=self._quantization))

    def output(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.output`."""
        return self.linear(weight, bias)

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Operators.head`. Never int4, which costs the draft more agreement than bytes."""
        quantization: Quantization | None = "int8" if self._quantization else None
        packed = self._kernels.pack(weight, quantization=quantization, dtype=torch.float32)
        return KernelLinear(packed)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> Linear:
        """See `Operators.gated`; `kernels_lack` knows that there is silu only."""
        if activation != "silu":
            raise ValueError(f"activation: {activation} is not in the fused kernels")
        return KernelLinear(self._kernels.pack_swiglu(gate, up, quantization=self._quantization))

    def attention(
        self, qkv: torch.Tensor, how: Attention, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """See `Operators.attention`."""
        query_norm, key_norm = how.query_norm, how.key_norm
        if query_norm is None or key_norm is None:
            return self._kernels.attention(qkv, how.rope, batch, cache, layer, window=how.window)
        return self._kernels.attention(
            qkv, how.rope, batch, cache, layer, window=how.window,
            query_norm=query_norm.weight, key_norm=key_norm.weight, eps=query_norm.eps,
        )  # fmt: skip


class Choice(NamedTuple):
    """Operators for a model, and why they are not the fused kernels where they are not."""

    operators: Operators
    why_not_kernels: str | None


def choose_operators(
    config: TransformerConfig,
    dtype: torch.dtype,
    *,
    quantization: Quantization | None,
    kernel_dir: Path | None,
    device: torch.device | str = "cpu",
) -> Choice:
    """The fastest operators that this machine can run this model with.

    Args:
        config: the model; the fused kernels lack some families' layers.
        dtype: of the model; the fused kernels are for bfloat16.
        quantization: of the weights, an option of the kernels for drafts; None keeps `dtype`.
        kernel_dir: where compiled kernels are kept; None keeps to PyTorch.
        device: of the model; the fused kernels are for CPUs.
    """
    if torch.device(device).type != "cpu":
        from impl.engine.gpu_operators import GpuOperators

        return Choice(GpuOperators.here(), f"they are for CPUs, not {device}")
    if kernel_dir is None:
        return Choice(TorchOperators(), "no directory for them")
    reason = kernels_lack(config, dtype) or CpuKernels.unavailable_reason(kernel_dir)
    kernels = None if reason else CpuKernels.load(kernel_dir, threads=None)
    if kernels is None:
        return Choice(TorchOperators(), reason)
    return Choice(KernelOperators(kernels, quantization), None)


def kernels_lack(config: TransformerConfig, dtype: torch.dtype) -> str | None:
    """What the fused CPU kernels do not have of a model, in words; None when they run it all."""
    family = config.family
    if dtype != torch.bfloat16:
        return f"they compute in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim % HEAD_DIM_STEP:
        return f"head_dim {config.head_dim} is no multiple of {HEAD_DIM_STEP}"
    if family.activation != "silu":
        return f"no {family.activation} activation"
    if family.norms.after_attention or family.norms.after_mlp:
        return "no norm behind a linear layer"
    if family.norm_offset or family.query_key_norm == "projection":
        return "no such norm"
    return None
