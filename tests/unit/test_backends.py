"""Which models the fused CPU kernels take, and that those come out as on PyTorch's operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_architectures import GEMMA, OLMO, SIZES, WINDOW, build, raw, tokens_of
from transformers import MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config

from impl.engine.architecture import TransformerConfig
from impl.engine.backends import choose_operators, kernels_lack
from impl.engine.gpu_operators import GpuOperators
from impl.engine.token_batch import TokenBatch
from impl.engine.transformer import Transformer

WIDE = {**SIZES, "head_dim": 32}


def parsed(config) -> TransformerConfig:
    return TransformerConfig.from_hf(getattr(config, "raw", None) or config.to_dict())


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (Qwen2Config(**WIDE), torch.bfloat16, None),
        (Qwen3Config(**WIDE), torch.bfloat16, None),
        (MistralConfig(**WIDE, sliding_window=WINDOW), torch.bfloat16, None),
        (Qwen2Config(**WIDE), torch.float32, "they compute in bfloat16, not float32"),
        (Qwen2Config(**SIZES), torch.bfloat16, "head_dim 8 is no multiple of 32"),
        (raw(**{**GEMMA, "head_dim": 32}), torch.bfloat16, "no gelu_tanh activation"),
        (
            Olmo2Config(**{**OLMO, "hidden_size": 192}),
            torch.bfloat16,
            "no norm behind a linear layer",
        ),
    ],
)
def test_what_the_kernels_lack_is_named(config, dtype, reason, tmp_path: Path):
    assert kernels_lack(parsed(config), dtype) == reason
    if reason:
        chosen = choose_operators(parsed(config), dtype, quantization=None, kernel_dir=tmp_path)
        assert (chosen.operators.name, chosen.why_not_kernels) == ("torch", reason)
        assert list(tmp_path.iterdir()) == []  # nothing was compiled for it


def test_the_kernels_are_for_cpus(tmp_path: Path):
    chosen = choose_operators(
        parsed(Qwen3Config(**WIDE)),
        torch.bfloat16,
        quantization=None,
        kernel_dir=tmp_path,
        device="cuda:1",
    )
    assert isinstance(chosen.operators, GpuOperators)
    assert chosen.why_not_kernels == "they are for CPUs, not cuda:1"


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**WIDE),
        MistralConfig(**WIDE, sliding_window=WINDOW),
        Qwen2Config(**WIDE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ],
    ids=lambda config: config.model_type,
)
def test_variants_on_the_kernels(config, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.getbasetemp() / "kernels"  # compiled once
    twins = build(config)
    operators, why_not = choose_operators(
        twins.ours.config, torch.bfloat16, quantization=None, kernel_dir=folder
    )
    if why_not:
        pytest.skip(why_not)
    weights, tokens = twins.reference.state_dict(), tokens_of(40)
    model = Transformer.from_weights(
        twins.ours.config, weights, dtype=torch.bfloat16, operators=operators
    )
    logits = model.forward(TokenBatch.causal([(0, 0, tokens)]), model.new_cache(1, 40))
    want = twins.want(tokens)
    assert (logits - want).norm() < 0.05 * want.norm()
    cache = model.new_cache(1, 40)
    model.prefill(cache, 0, tokens[:30])
    alone = [
        model.forward(TokenBatch.causal([(0, i, tokens[i : i + 1])]), cache) for i in range(30, 40)
    ]
    assert torch.equal(torch.cat(alone), logits[30:])
