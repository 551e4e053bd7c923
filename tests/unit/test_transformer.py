"""The engine's forward pass against Hugging Face's, in float32 on tiny random models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import ROOT, TokenTree
from impl.engine.transformer import PREFILL_CHUNK, Transformer

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.2,  # large enough that every term of the network matters
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": LlamaConfig(**SIZES),
    "llama-no-gqa": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama-multi-query": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=16),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=1e6),
}


def build(config):
    """A random Hugging Face model and ours with the same float32 weights."""
    torch.manual_seed(7)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    ours = Transformer.from_weights(
        TransformerConfig.from_hf(config.to_dict()), reference.state_dict(), dtype=torch.float32
    )
    return reference, ours


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request):
    return build(VARIANTS[request.param])


@pytest.fixture(scope="module")
def llama():
    return build(VARIANTS["llama"])


def tokens_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()


@torch.no_grad()
def reference_logits(reference, tokens):
    return reference(torch.tensor([tokens])).logits[0]


def causal(ours, cache, parts):
    return ours.forward(TokenBatch.causal(parts, CPU), cache)


def test_one_pass_equals_hugging_face(pair):
    reference, ours = pair
    tokens = tokens_of(64)
    logits = causal(ours, ours.new_cache(1, 64), [(0, 0, tokens)])
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_prefill_steps_tree_and_rollback_equal_hugging_face(pair):
    reference, ours = pair
    tokens, cache = tokens_of(64), ours.new_cache(2, 96)
    want = reference_logits(reference, tokens)
    ours.prefill(cache, 1, tokens[:40])
    for i in range(40, 64):
        logits = causal(ours, cache, [(1, i, tokens[i : i + 1])])
        torch.testing.assert_close(logits[0], want[i], atol=1e-4, rtol=0)


def test_prefill_in_chunks_equals_one_pass(llama):
    reference, ours = llama
    tokens, cache = tokens_of(2 * PREFILL_CHUNK + 9), ours.new_cache(1, 600)
    ours.prefill(cache, 0, tokens[:-1])
    assert cache.lengths == [len(tokens) - 1]
    logits = causal(ours, cache, [(0, len(tokens) - 1, tokens[-1:])])
    torch.testing.assert_close(
        logits[0], reference_logits(reference, tokens)[-1], atol=1e-4, rtol=0
    )


def test_sequences_of_different_lengths_share_a_pass(llama):
    reference, ours = llama
    cache = ours.new_cache(3, 64)
    contexts = {2: tokens_of(5, 1), 0: tokens_of(31, 2), 1: tokens_of(1, 3)}
    new = {2: tokens_of(3, 4), 0: tokens_of(1, 5), 1: tokens_of(6, 6)}
    for slot, context in contexts.items():
        ours.prefill(cache, slot, context)
    logits = causal(ours, cache, [(s, len(contexts[s]), new[s]) for s in (2, 0, 1)])
    want = [reference_logits(reference, contexts[s] + new[s])[-len(new[s]) :] for s in (2, 0, 1)]
    torch.testing.assert_close(logits, torch.cat(want), atol=1e-4, rtol=0)


def feed_tree(ours, cache, tree, first=0):
    segment = Segment(0, tree.trunk + first, len(tree) - first, tree.mask(first))
    batch = TokenBatch.pack(tree.tokens[first:], tree.positions(first), [segment], CPU)
    return ours.forward(batch, cache)


def test_a_tree_pass_equals_one_pass_per_branch(llama):
    reference, ours = llama
    context, cache = tokens_of(20), ours.new_cache(1, 64)
    ours.prefill(cache, 0, context)
    tree = TokenTree(20, capacity=16)
    root = tree.add(5)
    branches = {root: [5]}
    for parent, token in ((ROOT, 7), (root, 9), (root, 11), (2, 13), (1, 15), (4, 17)):
        node = tree.add(token, parent)
        branches[node] = [*branches.get(parent, []), token]
    logits = feed_tree(ours, cache, tree)
    for node, branch in branches.items():
        want = reference_logits(reference, context + branch)[-1]
        torch.testing.assert_close(logits[node], want, atol=1e-4, rtol=0)


def test_a_tree_grown_over_passes_and_its_gathered_branch_equal_plain_decoding(llama):
    reference, ours = llama
    context, cache = tokens_of(20), ours.new_cache(1, 64)
    ours.prefill(cache, 0, context)
    tree = TokenTree(20, capacity=16)
    tree.add(5)
    tree.add(6)
    feed_tree(ours, cache, tree)
    deep = [tree.add(8, 1), tree.add(9, 0)]
    logits = feed_tree(ours, cache, tree, first=2)
    want = reference_logits(reference, [*context, 6, 8])[-1]
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=0)
    cache.gather(0, tree.cells([1, deep[0]]))
    logits = causal(ours, cache, [(0, 22, [10, 12])])
    want = reference_logits(reference, [*context, 6, 8, 10, 12])[-2:]
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)


def test_rollback_leaves_no_trace(llama):
    _, ours = llama
    tokens = tokens_of(30)
    used, fresh = ours.new_cache(1, 64), ours.new_cache(1, 64)
    for cache in (used, fresh):
        ours.prefill(cache, 0, tokens[:20])
    causal(ours, used, [(0, 20, tokens_of(30, seed=9))])
    used.truncate(0, 50)
    used.truncate(0, 20)
    part = [(0, 20, tokens[20:])]
    assert torch.equal(causal(ours, used, part), causal(ours, fresh, part))


def test_logits_are_computed_for_the_asked_rows_only(llama):
    _, ours = llama
    batch = TokenBatch.causal([(0, 0, tokens_of(9))], CPU)
    every = ours.forward(batch, ours.new_cache(1, 16))
    some = ours.forward(batch, ours.new_cache(1, 16), rows=torch.tensor([2, 8]))
    torch.testing.assert_close(some, every[[2, 8]])


def test_a_trimmed_head_gives_the_same_logits_for_the_kept_tokens():
    config = VARIANTS["qwen2"]
    reference, full = build(config)
    kept = torch.tensor([0, 3, 50, 100])
    trimmed = Transformer.from_weights(
        full.config, reference.state_dict(), dtype=torch.float32, head_ids=kept
    )
    tokens = tokens_of(12)
    every = causal(full, full.new_cache(1, 16), [(0, 0, tokens)])
    some = causal(trimmed, trimmed.new_cache(1, 16), [(0, 0, tokens)])
    torch.testing.assert_close(some, every[:, kept])
    assert trimmed.vocabulary == 4


def test_bfloat16_follows_float32(llama):
    reference, exact = llama
    ours = Transformer.from_weights(exact.config, reference.state_dict(), dtype=torch.bfloat16)
    tokens = tokens_of(32)
    logits = causal(ours, ours.new_cache(1, 32), [(0, 0, tokens)])
    want = reference_logits(reference, tokens)
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_missing_and_misshapen_tensors_are_named():
    reference, ours = build(VARIANTS["llama"])
    weights = dict(reference.state_dict())
    down = weights.pop("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' is missing"):
        Transformer.from_weights(ours.config, weights, dtype=torch.float32)
    weights["model.layers.1.mlp.down_proj.weight"] = down.T
    with pytest.raises(ModelError, match=r"is \[80, 48\], want \[48, 80\]"):
        Transformer.from_weights(ours.config, weights, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_type: 'yarn'"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(change, message):
    config = {**VARIANTS["qwen2"].to_dict(), **change}
    with pytest.raises(ModelError, match=message):
        TransformerConfig.from_hf(config)
