"""Trains the `tiny` pair, the models behind every test that needs weights but no real ones.

    python scripts/train_tiny_pair.py [--out harness/tiny]

Both are Llama models over one byte-level BPE vocabulary, trained on the text of this repository
(Apache-2.0), so that nothing is downloaded. The target learns the text and the draft learns the
target's distribution (distillation); their agreement then lies where real pairs lie. One thread,
a fixed seed and a fixed number of steps: the same text and the same torch give the same weights.
The losses, the agreement and the revision and hash of the text go to training.json beside the
weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ("LICENSE", "*.md", "docs/*.md", "datasets/mini/*.jsonl", "harness/*.py")
SEED = 20260
VOCABULARY = 512
OPENING = 60  # characters of a paragraph that make a prompt
CONTEXT = 256  # tokens in a training window
BATCH = 8  # windows in a step
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Size of a model and length of its training."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    steps: int
    learning_rate: float


TARGET = Shape(96, 192, layers=3, heads=4, kv_heads=2, steps=800, learning_rate=4e-3)
DRAFT = Shape(48, 96, layers=2, heads=4, kv_heads=2, steps=800, learning_rate=6e-3)


@dataclass(frozen=True)
class Agreement:
    """The draft beside the target, on the target's own greedy continuations.

    Attributes:
        positions: tokens compared.
        agreement: share of them that are the draft's argmax too.
        ended: share of the continuations that ended by themselves.
        repetition: share of 4-grams that occurred before in the same continuation.
    """

    positions: int
    agreement: float
    ended: float
    repetition: float


def read_corpus() -> list[str]:
    """The repository's paragraphs and, from JSONL files, its prompts; in a fixed order."""
    paths = sorted({path for pattern in CORPUS for path in ROOT.glob(pattern)})
    paragraphs: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line]
            text = "\n\n".join(str(row["prompt"]) for row in rows)
        paragraphs += [part.strip() for part in text.split("\n\n") if part.strip()]
    return paragraphs


def train_tokenizer(paragraphs: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every string can be written, whatever it was trained on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=2048
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def chat(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A user's prompt in the chat template, up to where the assistant speaks."""
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def opening(paragraph: str) -> str:
    """The paragraph's first words: what a user says to be given the whole."""
    return paragraph[:OPENING].rsplit(maxsplit=1)[0]


def training_tokens(paragraphs: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Token ids [n]: the text as it stands, then as chats that continue what the user begins."""
    plain = [text + END_OF_TEXT for text in paragraphs]
    chats = [chat(tokenizer, opening(text)) + text + f"{TURN_END}\n" for text in paragraphs]
    documents = plain + chats
    random.Random(SEED).shuffle(documents)
    return torch.tensor(tokenizer.backend_tokenizer.encode("".join(documents)).ids)


def windows(tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """Random windows of the text, [BATCH, CONTEXT + 1] a step."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(CONTEXT + 1)]


def build(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model."""
    torch.manual_seed(SEED)
    end_of_text, _, turn_end = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    special = {
        "bos_token_id": end_of_text,
        "eos_token_id": [turn_end, end_of_text],
        "pad_token_id": end_of_text,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def train(
    shape: Shape, model: LlamaForCausalLM, tokens: Tensor, teacher: LlamaForCausalLM | None
) -> float:
    """Trains in place on the text or, given a teacher, on the teacher's distribution.

    Returns:
        The mean cross-entropy in nats of the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, betas=(0.9, 0.98))
    losses = []
    for step, window in enumerate(windows(tokens, shape.steps)):
        rate = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / shape.steps))
        optimizer.param_groups[0]["lr"] = shape.learning_rate * rate
        inputs, labels = window[:, :-1], window[:, 1:].flatten()
        goal = labels if teacher is None else probabilities(teacher, inputs)
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), goal)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 0:
            click.echo(f"  step {step}/{shape.steps}: loss {loss.item():.3f}")
    tail = losses[-max(1, shape.steps // 10) :]
    return sum(tail) / len(tail)


@torch.no_grad()
def probabilities(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    """The model's next-token distributions, [batch * positions, vocabulary]."""
    return model(inputs).logits.flatten(0, 1).softmax(-1)


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> LlamaForCausalLM:
    """Writes the Hugging Face layout in bfloat16; returns the model with the weights as written."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def measure(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
) -> Agreement:
    """Continues each prompt greedily by the target, then asks the draft at the same positions."""
    compared = agreed = ended = ngrams = repeated = 0
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=96
        )
        emitted = output[0, ids.shape[1] :]
        guesses = draft(output).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
        compared += len(emitted)
        agreed += int((guesses == emitted).sum())
        ended += int(emitted[-1]) in target.generation_config.eos_token_id
        grams = (
            [tuple(gram) for gram in emitted.unfold(0, 4, 1).tolist()] if len(emitted) >= 4 else []
        )
        ngrams += len(grams)
        repeated += len(grams) - len(set(grams))
    return Agreement(compared, agreed / compared, ended / len(prompts), repeated / max(1, ngrams))


def revision() -> str:
    """The git revision of the text."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "harness" / "tiny")
def main(out: Path) -> None:
    """Trains both models and writes them below OUT."""
    torch.set_num_threads(1)
    disable_progress_bar()
    started = time.perf_counter()
    paragraphs = read_corpus()
    tokenizer = train_tokenizer(paragraphs)
    tokens = training_tokens(paragraphs, tokenizer)
    click.echo(f"{len(paragraphs)} paragraphs, {len(tokens)} tokens")

    target, draft = build(TARGET, tokenizer), build(DRAFT, tokenizer)
    target_loss = train(TARGET, target, tokens, teacher=None)
    draft_loss = train(DRAFT, draft, tokens, teacher=target)
    target, draft = (
        save(model, tokenizer, out / name) for model, name in ((target, "target"), (draft, "draft"))
    )
    sample = random.Random(SEED).sample(paragraphs, 24)
    prompts = [opening(text) for text in sample[:12]]
    prompts += [chat(tokenizer, opening(text)) for text in sample[12:]]
    result = {
        "revision": revision(),
        "seed": SEED,
        "torch": torch.__version__,
        "corpus_sha256": hashlib.sha256("\n\n".join(paragraphs).encode()).hexdigest(),
        "tokens": len(tokens),
        "target_loss": round(target_loss, 3),
        "draft_loss": round(draft_loss, 3),
        **asdict(measure(target, draft, tokenizer, prompts)),
    }
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(json.dumps(result, indent=2))
    click.echo(f"wrote {out} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
