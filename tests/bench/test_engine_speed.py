"""The forward pass beside its floor (weight bytes over read bandwidth) and beside transformers.

The targets are ratios within one run, on one core, in bfloat16, with 200 tokens of context.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import HarnessError
from harness.pairs import find_pair, resolve
from impl.engine.models import ModelSpec
from impl.engine.token_batch import TokenBatch

CONTEXT = 200
STREAM_BYTES = 1 << 30  # far beyond any cache


def load(name: str, cache_dir):
    """The target of a pair that is on this machine already."""
    try:
        pair = resolve(find_pair(name), cache_dir, offline=True)
    except HarnessError as error:
        pytest.skip(f"{error}; fetch it with: harness pairs pull {name}")
    folder = pair.target.folder
    return folder, ModelSpec(folder, kernel_dir=cache_dir / "kernels").load()


def decode(model, tokens: int):
    """A function that feeds `tokens` new tokens behind the context and computes their logits."""
    cache = model.new_cache(1, CONTEXT + tokens)
    model.prefill(cache, 0, range(100, 100 + CONTEXT))
    batch = TokenBatch.causal([(0, CONTEXT, range(tokens))])
    return lambda: model.forward(batch, cache)


def stream():
    """A function that reads STREAM_BYTES of memory and does next to nothing else."""
    data = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)
    return data.sum


def floor_of(model, stream_seconds: float) -> float:
    return model.weight_bytes * stream_seconds / STREAM_BYTES


def test_smollm2_step_beside_its_floor(interleaved, note, cache_dir):
    _, model = load("smollm2-135m", cache_dir)
    best = interleaved({"stream": stream(), "step": decode(model, 1)}, rounds=15)
    floor = floor_of(model, best["stream"])
    note(
        f"SmolLM2-135M: step {best['step'] * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms, "
        f"{best['step'] / floor:.2f}x (target at most 2.0x) [{model.operators.name}]"
    )
    assert best["step"] <= 2.0 * floor


def test_smollm2_beside_transformers_generate(interleaved, note, cache_dir):
    folder, model = load("smollm2-135m", cache_dir)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = torch.arange(100, 100 + CONTEXT)[None]
    everything = torch.ones_like(prompt)

    def generate(tokens: int):
        return lambda: theirs.generate(
            prompt,
            attention_mask=everything,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    best = interleaved(
        {"step": decode(model, 1), "first": generate(1), "more": generate(17)}, rounds=5
    )
    per_token = (best["more"] - best["first"]) / 16
    note(
        f"SmolLM2-135M: transformers generate {per_token * 1e3:.1f} ms a token, "
        f"{per_token / best['step']:.2f}x ours (target at least 2.2x)"
    )
    assert per_token >= 2.2 * best["step"]


def test_qwen_steps_beside_the_floor(interleaved, note, cache_dir):
    _, model = load("qwen2.5-coder", cache_dir)
    best = interleaved(
        {"stream": stream(), "one": decode(model, 1), "six": decode(model, 6)}, rounds=9
    )
    floor = floor_of(model, best["stream"])
    note(
        f"Qwen2.5-1.5B: step {best['one'] * 1e3:.1f} ms, floor {floor * 1e3:.1f} ms, "
        f"{best['one'] / floor:.2f}x (target at most 1.3x); verifying 6 {best['six'] * 1e3:.1f} "
        f"ms, {best['six'] / best['one']:.2f}x one (target at most 1.4x) [{model.operators.name}]"
    )
    assert best["one"] <= 1.3 * floor
    assert best["six"] <= 1.4 * best["one"]
