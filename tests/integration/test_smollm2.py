"""The engine on SmolLM2-135M's real weights, out of the GGUF file, against transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.cache import default_cache_dir
from harness.errors import HarnessError
from harness.pairs import find_pair, resolve
from impl.engine.architecture import TransformerConfig
from impl.engine.backends import choose_operators
from impl.engine.loader import load_tokenizer, load_transformer, read_config
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import TokenTree

TEXT = (
    "Speculative decoding drafts a few tokens with a small model and lets the large one check them "
    "all in a single pass. When most are accepted, the large model runs less often."
)


@pytest.fixture(scope="module")
def folder():
    try:
        return resolve(find_pair("smollm2-135m"), default_cache_dir()).target.folder
    except HarnessError as error:
        pytest.skip(f"the weights cannot be had here: {error}")


@pytest.fixture(scope="module")
def ids(folder):
    return load_tokenizer(folder)(TEXT)["input_ids"]


@pytest.fixture(scope="module")
def reference(folder, ids):
    """Logits [tokens, vocabulary] of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def exact(folder):
    return load_transformer(folder, dtype=torch.float32)


def test_logits_equal_transformers(exact, ids, reference):
    batch = TokenBatch.causal([(0, 0, ids)])
    logits = exact.forward(batch, exact.new_cache(1, len(ids)))
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-5)


def test_prefill_steps_and_a_tree_pass_equal_transformers(exact, ids, reference):
    cache, half = exact.new_cache(1, len(ids) + 8), len(ids) // 2
    exact.prefill(cache, 0, ids[:half])
    for i in (half, half + 1):
        logits = exact.forward(TokenBatch.causal([(0, i, ids[i : i + 1])]), cache)
        torch.testing.assert_close(logits[0], reference[i], atol=1e-4, rtol=1e-5)
    tree = TokenTree(half + 2, capacity=8)
    trunk = tree.add(ids[half + 2])
    tree.add(ids[0], trunk)  # a branch that the text does not take
    tree.add(ids[half + 3], trunk)
    segment = Segment(0, tree.trunk, len(tree), tree.mask(0))
    batch = TokenBatch.pack(tree.tokens, tree.positions(0), [segment])
    logits = exact.forward(batch, cache)
    torch.testing.assert_close(
        logits[[0, 2]], reference[[half + 2, half + 3]], atol=1e-4, rtol=1e-5
    )


def test_the_bfloat16_kernels_rank_tokens_as_transformers_does(folder, ids, reference, tmp_path):
    config = TransformerConfig.from_hf(read_config(folder))
    operators, _ = choose_operators(config, torch.bfloat16, quantization=None, kernel_dir=tmp_path)
    model = load_transformer(folder, dtype=torch.bfloat16, operators=operators)
    batch = TokenBatch.causal([(0, 0, ids)])
    logits = model.forward(batch, model.new_cache(1, len(ids)))
    agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean()
    assert agreement > 0.9  # bfloat16 moves logits by some 0.1, enough for a few near ties
    assert (logits - reference).abs().median() < 0.2
