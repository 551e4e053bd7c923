"""Which part of a model each rank has: worked out by hand on small tensors and tiny shapes."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig
from impl.engine.tensor_parallel.sharding import ShardedWeights, shard, shard_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def test_a_column_wise_layer_is_cut_by_what_it_gives() -> None:
    weight, bias = torch.arange(12.0).view(4, 3), torch.arange(4.0)
    column = ColwiseParallel()
    assert shard(weight, "weight", column, 0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert shard(weight, "weight", column, 1, 2).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert shard(bias, "bias", column, 1, 2).tolist() == [2, 3]


def test_a_row_wise_layer_is_cut_by_what_it_takes_and_keeps_its_bias() -> None:
    weight, bias = torch.arange(12.0).view(3, 4), torch.arange(3.0)
    row = RowwiseParallel()
    assert shard(weight, "weight", row, 0, 2).tolist() == [[0, 1], [4, 5], [8, 9]]
    assert shard(weight, "weight", row, 1, 2).tolist() == [[2, 3], [6, 7], [10, 11]]
    assert shard(bias, "bias", row, 1, 2).tolist() == [0, 1, 2]


def test_only_the_layers_of_the_plan_are_cut() -> None:
    weights = {
        "model.layers.0.self_attn.k_proj.weight": torch.ones(4, 6),
        "model.layers.0.self_attn.o_proj.weight": torch.ones(6, 4),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(4),
        "model.layers.0.mlp.up_proj.weight": torch.ones(8, 6),
        "model.layers.0.mlp.down_proj.weight": torch.ones(6, 8),
        "model.embed_tokens.weight": torch.ones(10, 6),
        "lm_head.weight": torch.ones(10, 6),
    }
    parts = ShardedWeights(weights, rank=1, ranks=2)
    assert {name.split(".")[-2]: tuple(part.shape) for name, part in parts.items()} == {
        "k_proj": (2, 6),
        "o_proj": (6, 2),
        "q_norm": (4,),
        "up_proj": (4, 6),
        "down_proj": (6, 4),
        "embed_tokens": (10, 6),
        "lm_head": (10, 6),
    }


def test_each_rank_has_its_share_of_heads_and_features() -> None:
    config = shard_config(TransformerConfig.from_hf(LLAMA), 3)
    assert (config.heads, config.kv_heads, config.intermediate_size) == (4, 2, 32)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (48, 4, 100)


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 4, "4 devices cannot share the model's num_key_value_heads 6 evenly; give 1 or 2 or"),
        ({}, 5, "5 devices cannot share the model's num_attention_heads 12 evenly"),
        (
            {"intermediate_size": 97},
            2,
            "2 devices cannot share the model's intermediate_size 97 evenly; give 1$",
        ),
        ({"model_type": "olmo2"}, 2, "olmo2 has norms over all heads"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(changes, ranks, reason) -> None:
    with pytest.raises(ModelError, match=f"^target_devices: {reason}"):
        shard_config(TransformerConfig.from_hf(LLAMA | changes), ranks)
