"""Every architecture of the engine against transformers, in float32 on tiny random models."""

from __future__ import annotations

import pytest
import torch
from tiny_architectures import (
    CHECKS,
    GEMMA,
    SIZES,
    VARIANTS,
    build,
    greedy,
    raw,
    reference_greedy,
    tokens_of,
)
from transformers import LlamaConfig, Qwen2Config

from harness.errors import ModelError
from impl.engine.architecture import FAMILIES, TransformerConfig
from impl.engine.token_batch import Segment
from impl.engine.transformer import Transformer


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def twins(request):
    return build(VARIANTS[request.param])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_logits_equal_transformers(check, twins):
    assert check(twins) < 1e-4


def test_64_greedy_tokens_equal_transformers(twins):
    prompt = tokens_of(12, seed=5)
    assert greedy(twins, prompt, 64) == reference_greedy(twins, prompt, 64)


def test_every_family_is_tried():
    assert {config.model_type for config in VARIANTS.values()} == set(FAMILIES)


def test_a_windowed_token_sees_the_newest_cells_of_its_path():
    """A trunk of 3 cells, then a chain of 2 nodes and a sibling of its second node."""
    tail = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    segment = Segment(0, 3, 3, tail)
    assert segment.visible(3).int().tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 1],
    ]
    assert segment.tail(1).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert Segment(0, 2, 2).visible(2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert Segment(0, 1, 1).visible().int().tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, [4096, 4096, 4096]),  # what transformers takes it to mean
        ({"model_type": "mistral", "sliding_window": None}, [None, None, None]),
        ({"model_type": "qwen2", "sliding_window": 9}, [None, None, None]),
        ({**GEMMA, "sliding_window_pattern": 3}, [7, 7, None]),
        ({**GEMMA, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}, [None, 7, 7]),
    ],
)
def test_windows_of_the_layers(config, windows):
    parsed = TransformerConfig.from_hf({**SIZES, **config})
    assert [attention.window for attention in parsed.attention] == windows


def test_layers_with_a_window_have_their_own_rotary_base():
    config = raw(**GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    for given in (config.raw, config.to_dict()):  # of transformers 4 and 5
        local, full, _ = TransformerConfig.from_hf(given).attention
        assert (local.rope.theta, local.rope.scaling) == (10_000.0, None)
        assert (full.rope.theta, full.rope.scaling.factor) == (1_000_000.0, 8.0)


LLAMA, QWEN2 = LlamaConfig(**SIZES).to_dict(), Qwen2Config(**SIZES).to_dict()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**QWEN2, "model_type": "mamba"},
            r"model_type: 'mamba' is not supported .*\(supported: llama, mistral, ",
        ),
        ({**QWEN2, "hidden_act": "gelu"}, r"hidden_act: 'gelu' .* for qwen2 \(only silu\)"),
        (
            {**GEMMA, "hidden_activation": "silu"},
            r"hidden_activation: 'silu' .* \(only gelu_tanh\)",
        ),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: 50\.0"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, r"final_logit_softcapping: 30\.0"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({**QWEN2, "layer_types": ["linear_attention"] * 3}, "layer_types: 'linear_attention'"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias: True"),
        ({**QWEN2, "rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_type: 'yarn'"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name_with_the_way_out(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        TransformerConfig.from_hf(config)
    assert str(caught.value).endswith("; `--engine hf` runs it through transformers")
    assert "\n" not in str(caught.value)


def test_a_config_that_lacks_a_field_is_refused_by_its_name():
    with pytest.raises(ModelError, match=r"config\.json: lacks rms_norm_eps; fetch"):
        TransformerConfig.from_hf({**QWEN2, "rms_norm_eps": None})


def test_a_tensor_that_the_engine_would_leave_out_is_refused():
    twins = build(LlamaConfig(**SIZES))
    weights = dict(twins.reference.state_dict())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # old checkpoints
    Transformer.from_weights(twins.ours.config, weights, dtype=torch.float32)
    weights["model.layers.2.mlp.up_proj.bias"] = torch.zeros(80)
    with pytest.raises(ModelError, match=r"'model\.layers\.2\.mlp\.up_proj\.bias' is no part of"):
        Transformer.from_weights(twins.ours.config, weights, dtype=torch.float32)
