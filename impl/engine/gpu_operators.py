"""The operators on GPUs: cuBLAS for linear layers; small operators are fused where that compiles.

Which attention and whether to compile goes by what is installed; the name of the operators, in
every manifest, says so.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from impl.engine.architecture import Activation
from impl.engine.operators import (
    AddedResidual,
    Linear,
    Norm,
    TorchLinear,
    TorchOperators,
    gated,
    normalised,
)
from impl.engine.padded_attention import Fuse, PaddedAttention, flash_attention

_COMPILERS = ("cc", "gcc", "clang")  # Triton builds its launchers with one of these


class GpuLinear(TorchLinear):
    """A layer whose residual is added by the matrix product itself."""

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is None or self.bias is not None:
            return super().__call__(x, norm=norm, residual=residual)
        return torch.addmm(residual, normalised(x, norm), self.weight.t())


class GpuGated(AddedResidual):
    """Gate and up projections as one layer, then activation(gate) * up in one kernel."""

    def __init__(self, gate_up: Linear, activation: Activation, fuse: Fuse) -> None:
        self.weight_bytes = gate_up.weight_bytes
        self._gate_up = gate_up
        self._activation = activation
        self._combine = fuse(gated)

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return self._combine(self._gate_up(x, norm=norm), self._activation)


class GpuOperators(TorchOperators):
    """See the module docstring; `padded_attention` is what `GpuTransformer` runs."""

    def __init__(self, *, flash: Any | None, fused: bool) -> None:
        """Args: `flash` is what `flash_attention` gives; `fused` compiles the small operators."""
        self.name = f"gpu-{'flash-attn' if flash else 'sdpa'}{'-fused' if fused else ''}"
        self._fuse: Fuse = torch.compile if fused else _as_it_is
        self.padded_attention = PaddedAttention(flash=flash, fuse=self._fuse)

    @classmethod
    def here(cls) -> GpuOperators:
        """By what this machine has."""
        return cls(flash=flash_attention(), fused=cannot_compile() is None)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See `Operators.linear`."""
        return GpuLinear(weight, bias)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> Linear:
        """See `Operators.gated`."""
        return GpuGated(self.linear(torch.cat((gate, up)), None), activation, self._fuse)


def cannot_compile() -> str | None:
    """What `torch.compile` lacks to make GPU kernels here, in words; None when it has all."""
    if importlib.util.find_spec("triton") is None:
        return "no Triton"
    if not any(map(shutil.which, _COMPILERS)):
        return f"no C compiler ({', '.join(_COMPILERS)})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "no Python.h"
    return None


def _as_it_is(function: Any) -> Any:
    return function
