"""The shipped `tiny` pair, as Hugging Face's own classes see it."""

import hashlib
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "harness" / "tiny"
PROMPTS = [
    "What is a decoding method?",
    "Explain how a run is stored.",
    "Which licence applies to the work?",
    "Why does the draft wait for the target?",
    "The speculation cache",
    "Write a poem about rain in spring.",
    "def step(self)",
    "A request is refused when",
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module")
def models():
    import torch
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(TINY / name, dtype=torch.float32)
        for name in ("target", "draft")
    }


@pytest.fixture(scope="module")
def continuations(models, tokenizer):
    """Per prompt: (prompt length, ids of prompt and the target's greedy continuation [1, n])."""
    results = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        output = models["target"].generate(ids, do_sample=False, max_new_tokens=64)
        results.append((ids.shape[1], output))
    return results


def test_both_together_stay_well_under_a_megabyte():
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) < 900_000


def test_target_and_draft_share_one_tokenizer():
    digests = {
        hashlib.sha256((TINY / name / "tokenizer.json").read_bytes()).hexdigest()
        for name in ("target", "draft")
    }
    assert len(digests) == 1


def test_chat_template_marks_the_turns(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 🙂", "tab\t and\r\n line ends  ", ""])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_vocabularies_and_stop_tokens_fit(models, tokenizer):
    stops = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    for model in models.values():
        assert model.config.vocab_size == len(tokenizer)
        assert set(model.generation_config.eos_token_id) == stops


def test_draft_agrees_often_but_not_always(models, continuations):
    agreed = compared = 0
    for start, output in continuations:
        guesses = models["draft"](output).logits[0, start - 1 : -1].argmax(-1)
        agreed += int((guesses == output[0, start:]).sum())
        compared += output.shape[1] - start
    assert 0.5 < agreed / compared < 0.8


def test_output_varies_with_the_prompt_and_does_not_loop(continuations):
    texts = [tuple(output[0, start:].tolist()) for start, output in continuations]
    grams = [text[i : i + 4] for text in texts for i in range(len(text) - 3)]
    assert len(set(texts)) == len(PROMPTS)
    assert len(set(grams)) > 0.5 * len(grams)


def test_some_outputs_end_by_themselves_and_some_run_on(models, continuations):
    stops = models["target"].generation_config.eos_token_id
    ended = [int(output[0, -1]) in stops for _, output in continuations]
    assert any(ended)
    assert not all(ended)
