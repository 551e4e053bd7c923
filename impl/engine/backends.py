"""Which operators a model runs on: the fused CPU kernels where they can be built, else PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

from impl.engine.cpu_kernels import CpuKernels, PackedLinear
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
    """Bfloat16 activations on AVX512, weights in bfloat16 or int8; rows never affect each other."""

    def __init__(self, kernels: CpuKernels, *, int8: bool) -> None:
        self._kernels = kernels
        self._pack = kernels.pack_int8 if int8 else kernels.pack_bf16
        self._pack_swiglu = kernels.pack_swiglu_int8 if int8 else kernels.pack_swiglu_bf16
        self.name = "cpu-kernels-int8" if int8 else "cpu-kernels-bf16"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.linear`."""
        return KernelLinear(self._pack(weight, bias))

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Operators.head`."""
        return KernelLinear(self._pack(weight, dtype=torch.float32))

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> Linear:
        """See `Operators.swiglu`."""
        return KernelLinear(self._pack_swiglu(gate, up))

    def attention(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """See `Operators.attention`."""
        return self._kernels.attention(qkv, rope, batch, cache, layer)


def choose_operators(
    dtype: torch.dtype, head_dim: int, *, int8: bool, kernel_dir: Path | None
) -> Operators:
    """The fastest operators that this machine can run.

    Args:
        dtype: of the model; the fused kernels are for bfloat16.
        head_dim: of the model; the fused kernels take multiples of HEAD_DIM_STEP.
        int8: whether weights may be quantised (a draft's; the kernels' option).
        kernel_dir: where compiled kernels are kept; None keeps to PyTorch.
    """
    if dtype == torch.bfloat16 and kernel_dir is not None and head_dim % HEAD_DIM_STEP == 0:
        kernels = CpuKernels.load(kernel_dir, torch.get_num_threads())
        if kernels is not None:
            return KernelOperators(kernels, int8=int8)
    return TorchOperators()
