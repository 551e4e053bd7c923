"""Which operators a model runs on: the fused CPU kernels where they can be built, else PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

from impl.engine.cpu_kernels import CpuKernels, PackedLinear, Quantization
from impl.engine.kv_cache import KVCache
from impl.engine.operators import Linear, Norm, Operators, TorchOperators
from impl.engine.token_batch import TokenBatch

HEAD_DIM_STEP = 32  # elements that one step of the attention kernel takes


class KernelLinear:
    """A layer of the fused kernels, called as the transformer calls it."""

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed
        self.weight_bytes = packed.weight_bytes

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if norm is None:
            return self._packed(x, residual=residual)
        return self._packed(x, norm_weight=norm.weight, eps=norm.eps, residual=residual)


class KernelOperators:
    """Bfloat16 activations on AVX512, weights quantised or not; rows never affect each other."""

    def __init__(self, kernels: CpuKernels, quantization: Quantization | None) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self.name = f"cpu-kernels-{quantization or 'bf16'}"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.linear`."""
        return KernelLinear(self._kernels.pack(weight, bias, quantization=self._quantization))

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Operators.head`. Never int4, which costs the draft more agreement than bytes."""
        quantization: Quantization | None = "int8" if self._quantization else None
        packed = self._kernels.pack(weight, quantization=quantization, dtype=torch.float32)
        return KernelLinear(packed)

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> Linear:
        """See `Operators.swiglu`."""
        return KernelLinear(self._kernels.pack_swiglu(gate, up, quantization=self._quantization))

    def attention(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """See `Operators.attention`."""
        return self._kernels.attention(qkv, rope, batch, cache, layer)


def choose_operators(
    dtype: torch.dtype,
    head_dim: int,
    *,
    quantization: Quantization | None,
    kernel_dir: Path | None,
) -> Operators:
    """The fastest operators that this machine can run.

    Args:
        dtype: of the model; the fused kernels are for bfloat16.
        head_dim: of the model; the fused kernels take multiples of HEAD_DIM_STEP.
        quantization: of the weights, an option of the kernels for drafts; None keeps `dtype`.
        kernel_dir: where compiled kernels are kept; None keeps to PyTorch.
    """
    if dtype == torch.bfloat16 and kernel_dir is not None and head_dim % HEAD_DIM_STEP == 0:
        kernels = CpuKernels.load(kernel_dir, torch.get_num_threads())
        if kernels is not None:
            return KernelOperators(kernels, quantization)
    return TorchOperators()
