"""What the forward pass does for every architecture alike; test_architectures compares logits."""

from __future__ import annotations

import pytest
import torch
from tiny_architectures import SIZES, build, tokens_of
from transformers import LlamaConfig

from harness.errors import ModelError
from impl.engine.token_batch import TokenBatch
from impl.engine.token_tree import ROOT, TokenTree
from impl.engine.transformer import PREFILL_CHUNK, Transformer


@pytest.fixture(scope="module")
def llama():
    return build(LlamaConfig(**SIZES))


def test_prefill_in_chunks_equals_one_pass(llama):
    tokens, cache = tokens_of(2 * PREFILL_CHUNK + 9), llama.ours.new_cache(1, 600)
    llama.ours.prefill(cache, 0, tokens[:-1])
    assert cache.lengths == [len(tokens) - 1]
    logits = llama.feed(cache, [(0, len(tokens) - 1, tokens[-1:])])
    torch.testing.assert_close(logits[0], llama.want(tokens)[-1], atol=1e-4, rtol=0)


def test_a_tree_pass_equals_one_pass_per_branch(llama):
    context, cache = tokens_of(20), llama.ours.new_cache(1, 64)
    llama.ours.prefill(cache, 0, context)
    tree = TokenTree(20, capacity=16)
    root = tree.add(5)
    branches = {root: [5]}
    for parent, token in ((ROOT, 7), (root, 9), (root, 11), (2, 13), (1, 15), (4, 17)):
        node = tree.add(token, parent)
        branches[node] = [*branches.get(parent, []), token]
    logits = llama.feed_tree(cache, tree)
    for node, branch in branches.items():
        torch.testing.assert_close(
            logits[node], llama.want(context + branch)[-1], atol=1e-4, rtol=0
        )


def test_rollback_leaves_no_trace(llama):
    tokens = tokens_of(30)
    used, fresh = llama.ours.new_cache(1, 64), llama.ours.new_cache(1, 64)
    for cache in (used, fresh):
        llama.ours.prefill(cache, 0, tokens[:20])
    llama.feed(used, [(0, 20, tokens_of(30, seed=9))])
    used.truncate(0, 50)
    used.truncate(0, 20)
    part = [(0, 20, tokens[20:])]
    assert torch.equal(llama.feed(used, part), llama.feed(fresh, part))


def test_logits_are_computed_for_the_asked_rows_only(llama):
    batch = TokenBatch.causal([(0, 0, tokens_of(9))])
    every = llama.ours.forward(batch, llama.ours.new_cache(1, 16))
    some = llama.ours.forward(batch, llama.ours.new_cache(1, 16), rows=torch.tensor([2, 8]))
    torch.testing.assert_close(some, every[[2, 8]])


def test_a_trimmed_head_gives_the_same_logits_for_the_kept_tokens(llama):
    kept = torch.tensor([0, 3, 50, 100])
    trimmed = Transformer.from_weights(
        llama.ours.config, llama.reference.state_dict(), dtype=torch.float32, head_ids=kept
    )
    part = [(0, 0, tokens_of(12))]
    every = llama.feed(llama.ours.new_cache(1, 16), part)
    some = trimmed.forward(TokenBatch.causal(part), trimmed.new_cache(1, 16))
    torch.testing.assert_close(some, every[:, kept])
    assert trimmed.vocabulary == 4


def test_bfloat16_follows_float32(llama):
    weights, tokens = llama.reference.state_dict(), tokens_of(32)
    ours = Transformer.from_weights(llama.ours.config, weights, dtype=torch.bfloat16)
    logits = ours.forward(TokenBatch.causal([(0, 0, tokens)]), ours.new_cache(1, 32))
    want = llama.want(tokens)
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_missing_and_misshapen_tensors_are_named(llama):
    weights = dict(llama.reference.state_dict())
    down = weights.pop("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' is missing"):
        Transformer.from_weights(llama.ours.config, weights, dtype=torch.float32)
    weights["model.layers.1.mlp.down_proj.weight"] = down.T
    with pytest.raises(ModelError, match=r"is \[80, 48\], want \[48, 80\]"):
        Transformer.from_weights(llama.ours.config, weights, dtype=torch.float32)
