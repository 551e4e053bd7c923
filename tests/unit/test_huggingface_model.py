"""Engine hf: transformers' own layers behind the engine's interface, against plain passes."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_architectures import CHECKS, SIZES, VARIANTS, WINDOW, Twins, greedy, reference_greedy
from tiny_architectures import tokens_of as tokens
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import ModelError
from impl.engine import huggingface_model
from impl.engine.huggingface_model import HuggingFaceModel
from impl.engine.token_batch import TokenBatch

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 640}
MIXED = {**SIZES, "sliding_window": WINDOW}
MODELS = {
    "Llama 3.x": VARIANTS["Llama 3.x"],
    "Mistral, sliding window": VARIANTS["Mistral, sliding window"],
    "Gemma 3 text": VARIANTS["Gemma 3 text"],
    # Not in the lean engine: softcaps, learned positions, experts, attention sinks.
    "Gemma 2": AutoConfig.for_model("gemma2", **MIXED, query_pre_attn_scalar=8),
    "GPT-2": AutoConfig.for_model("gpt2", **GPT2, initializer_range=0.2, eos_token_id=1),
    "Mixtral": AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4, sliding_window=None),
    "GPT-OSS": AutoConfig.for_model("gpt_oss", **MIXED, num_local_experts=4),
}


def random_model(config):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


@pytest.fixture(scope="module", params=MODELS, ids=str)
def twins(request):
    model = random_model(MODELS[request.param])
    return Twins(model, HuggingFaceModel(model))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_logits_equal_plain_passes(check, twins):
    assert check(twins) < 1e-4


def test_greedy_tokens_equal_generate(twins):
    assert greedy(twins, tokens(12, seed=5), 32) == reference_greedy(twins, tokens(12, seed=5), 32)


def test_a_trimmed_head_and_asked_rows():
    model = random_model(MODELS["GPT-2"])
    kept, batch = torch.tensor([0, 3, 50]), TokenBatch.causal([(0, 0, tokens(9))])
    full, trimmed = HuggingFaceModel(model), HuggingFaceModel(model, kept)
    every = full.forward(batch, full.new_cache(1, 16))
    rows = torch.tensor([2, 8])
    some = trimmed.forward(batch, trimmed.new_cache(1, 16), rows)
    torch.testing.assert_close(some, every[rows][:, kept])
    assert (full.vocabulary, trimmed.vocabulary, full.max_position) == (101, 3, 640)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("mamba", {}, r"layer_types: 'linear_attention' cannot run with engine hf"),
        ("bloom", {}, r"model_type: 'bloom' cannot run with engine hf: it takes no masks"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 3, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16},
            r"'deepseek_v3' .*: its cache is of another kind \(keys and values differ in shape\)",
        ),
    ],
)
def test_models_that_cannot_roll_back_or_mask_are_refused(kind, sizes, message):
    config = AutoConfig.for_model(kind, **SMALL, **sizes)
    with pytest.raises(ModelError, match=message) as caught:
        HuggingFaceModel(random_model(config))
    assert "\n" not in str(caught.value)


def test_a_model_that_ignores_its_mask_is_refused(monkeypatch):
    """As one would that computes a causal mask of its own whatever it is given."""

    def all_visible(self, segments, width, end, window):
        return torch.zeros(len(segments), 1, width, end)

    monkeypatch.setattr(huggingface_model.HuggingFaceModel, "_mask", all_visible)
    with pytest.raises(ModelError, match=r"its logits are off by [\d.]+% from a plain pass"):
        HuggingFaceModel(random_model(MODELS["Llama 3.x"]))


def test_a_folder_that_transformers_does_not_know_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelError, match="transformers cannot load it") as caught:
        HuggingFaceModel.load(tmp_path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_code_of_a_model_folder_is_never_run(tmp_path):
    evil = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Model: pass\n"
    (tmp_path / "modeling.py").write_text(evil)
    automatic = {"AutoConfig": "modeling.Model", "AutoModelForCausalLM": "modeling.Model"}
    config = {"model_type": "nonesuch", "auto_map": automatic}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="transformers cannot load it"):
        HuggingFaceModel.load(tmp_path, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()
