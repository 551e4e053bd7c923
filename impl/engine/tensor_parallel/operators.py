"""Operators of one rank: a backend's own, with the sums and gathers that join the ranks' parts."""

from __future__ import annotations

import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from impl.engine.architecture import Activation
from impl.engine.kv_cache import KVCache
from impl.engine.operators import AddedResidual, Attention, Linear, Norm, Operators
from impl.engine.tensor_parallel.rank_group import RankGroup
from impl.engine.tensor_parallel.sharding import shard
from impl.engine.token_batch import TokenBatch


class Summed:
    """A row-wise layer: the ranks' results are added up, with one residual among them."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        self._linear, self._group = linear, group
        self.weight_bytes = linear.weight_bytes

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        own = residual if self._group.rank == 0 else None
        return self._group.sum_(self._linear(x, norm=norm, residual=own))


class Gathered(AddedResidual):
    """A column-wise layer whose results [N, out] the leader gets whole; others have their part."""

    def __init__(self, linear: Linear, group: RankGroup, out_features: int) -> None:
        self._linear, self._group, self._out_features = linear, group, out_features
        self.weight_bytes = linear.weight_bytes

    def product(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `AddedResidual`."""
        return self._group.gather_columns(self._linear(x, norm=norm))[:, : self._out_features]


class RankOperators:
    """See the module docstring; `impl.engine.operators.Operators` says what each method does."""

    def __init__(self, operators: Operators, group: RankGroup) -> None:
        self._operators, self._group = operators, group
        self.name = operators.name
        # Two numbers have one sum; of more, the order of the sum goes by the size of the tensor.
        self.batch_invariant = operators.batch_invariant and group.size <= 2

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A column-wise layer: weight and bias are the rank's part."""
        return self._operators.linear(weight, bias)

    def output(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A row-wise layer: weight is the rank's part; the bias is whole, and counted once."""
        own = bias if self._group.rank == 0 else None
        return Summed(self._operators.output(weight, own), self._group)

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> Linear:
        """A column-wise layer: gate and up are the rank's part."""
        return self._operators.gated(gate, up, activation)

    def head(self, weight: torch.Tensor) -> Linear:
        """Takes the whole weight and keeps the rank's part, padded to the size of the others'."""
        rank, size = self._group.rank, self._group.size
        part = shard(weight, "weight", ColwiseParallel(), rank, size)
        padded = weight.new_zeros(-(-len(weight) // size), weight.shape[1])
        padded[: len(part)] = part
        return Gathered(self._operators.head(padded), self._group, len(weight))

    def attention(
        self, qkv: torch.Tensor, how: Attention, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """The rank's heads; each has its own keys and values."""
        return self._operators.attention(qkv, how, batch, cache, layer)
