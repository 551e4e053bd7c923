"""Which part of a model each rank has: a plan for `torch.distributed.tensor.parallel`.

A rank has some heads of every attention and some features of every gate (column-wise plans), and
the inputs of the layer behind them that come from there (row-wise plans). What such a layer gives
is a summand, so one sum over the ranks ends each half of a block. The output head is shared out by
tokens of the vocabulary. Embedding and norms are on every rank.

DTensor cuts the weights; the engine's own operators then run on each rank's part, which costs
nothing a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig

PLAN: Mapping[str, type[ParallelStyle]] = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}


def shard_config(config: TransformerConfig, ranks: int) -> TransformerConfig:
    """The shape of one rank's part of a model.

    Raises:
        ModelError: heads or features cannot be shared out evenly, or a norm runs over all heads.
    """
    sizes = {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % ranks:
            common = math.gcd(*sizes.values())
            fitting = [str(number) for number in range(1, common + 1) if common % number == 0]
            raise ModelError(
                f"target_devices: {ranks} devices cannot share the model's {name} {size} evenly; "
                f"give {' or '.join(fitting)}"
            )
    if config.family.query_key_norm == "projection":
        raise ModelError(
            f"target_devices: {config.model_type} has norms over all heads, which cannot be on "
            "different devices; give one"
        )
    return replace(
        config,
        heads=config.heads // ranks,
        kv_heads=config.kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


class ShardedWeights(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors under their names, cut to one rank's part when they are read."""

    def __init__(self, weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> None:
        self._weights, self._rank, self._ranks = weights, rank, ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        *_, module, kind = ["", *name.split(".")]
        style = PLAN.get(module)
        if style is None:
            return weight
        return shard(weight, kind, style(), self._rank, self._ranks)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def shard(
    tensor: torch.Tensor, kind: str, style: ParallelStyle, rank: int, ranks: int
) -> torch.Tensor:
    """A rank's part of a linear layer's "weight" or "bias", as torch's plan of that style has it.

    Every rank has the whole bias of a row-wise layer.
    """
    layer = nn.Linear(1, 1, bias=False, device="meta")
    weight = tensor if kind == "weight" else tensor[:, None]  # the plan wants one
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if kind == "bias":
        layer.bias = nn.Parameter(tensor, requires_grad=False)
    # Each rank cuts its own copy of the tensor: no messages, hence no process group.
    mesh = DeviceMesh(tensor.device.type, list(range(ranks)), _init_backend=False, _rank=rank)
    parallelize_module(layer, mesh, style, src_data_rank=None)
    part: DTensor = getattr(layer, kind)
    return part.to_local()
