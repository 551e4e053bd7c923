"""Real weights: SmolLM2 is pulled (90 MB, once), the Qwen pair is looked at where it is cached."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from harness.cache import default_cache_dir
from harness.errors import ModelError
from harness.pairs import ResolvedPair, find_pair, resolve
from harness.tokenizer_checks import check_tokenizers
from impl.engine import loader

TEXTS = [
    "def f(n):\n\treturn {k: v**2 for k, v in zip(range(n), 'abc')}  # ok\r\n\n",
    "Prices: 1,234.50 € and ½ of 2024; DON'T, I'll, we've.",
    "漢字 かな 한국어 العربية हिन्दी 🙂👩‍👩‍👧 café",
    "   leading, trailing and\u00a0odd spaces \t ",
]


def resolved_or_skip(name: str, *, offline: bool) -> ResolvedPair:
    try:
        return resolve(find_pair(name), default_cache_dir(), offline=offline)
    except ModelError as error:
        if "no source serves it" not in str(error) or "sha256" in str(error):
            raise
        pytest.skip(f"{name}: neither cached nor to be had from here ({error})")


@pytest.fixture(scope="module")
def smollm2() -> ResolvedPair:
    return resolved_or_skip("smollm2-135m", offline=False)


@pytest.fixture(scope="module")
def qwen() -> ResolvedPair:
    return resolved_or_skip("qwen2.5-coder", offline=True)


def test_smollm2_has_the_published_shape(smollm2):
    config = loader.read_config(smollm2.target.folder)
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {name: config[name] for name in published} == published
    assert smollm2.target.parameters == 134_515_008
    assert smollm2.target.weight_bytes == 2 * 134_515_008


def test_smollm2_tokenizer(smollm2):
    tokenizer = loader.load_tokenizer(smollm2.target.folder)
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS
    assert 2 in loader.eos_token_ids(smollm2.target.folder)


def test_transformers_loads_the_conversion_and_it_makes_sense(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.target.folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert "The capital of France is Paris." in answer


@pytest.mark.alone
def test_second_load_is_quick(smollm2):
    start = time.perf_counter()
    again = resolve(find_pair("smollm2-135m"), default_cache_dir(), offline=True)
    loader.read_weights(again.target.folder)
    assert time.perf_counter() - start < 2
    assert again.target.source == "cache"


def test_qwen_pair_shares_its_tokenizer(qwen):
    folders = qwen.target.folder, qwen.draft.folder
    assert check_tokenizers(*folders) == 151936
    for folder in folders:
        assert loader.eos_token_ids(folder) == {151643, 151645}


def test_qwen_tokenizer_agrees_with_transformers(qwen):
    from transformers import AutoTokenizer

    folder: Path = qwen.target.folder
    tokenizer = loader.load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)  # Qwen2Tokenizer builds its own rules
    assert type(theirs).__name__ == "Qwen2Tokenizer"
    assert [tokenizer(text).input_ids for text in TEXTS] == [theirs(t).input_ids for t in TEXTS]
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [151643, 151644, 151645]
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert len(tokenizer) == 151665  # as published; the rest of the embedding is padding


@pytest.mark.alone
def test_second_load_of_the_qwen_pair_is_quick(qwen):
    start = time.perf_counter()
    again = resolve(find_pair("qwen2.5-coder"), default_cache_dir(), offline=True)
    for model in (again.target, again.draft):
        loader.read_weights(model.folder)
    assert time.perf_counter() - start < 4  # half of the time allowed for a whole second load
