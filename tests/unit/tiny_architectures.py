"""Tiny random models of every architecture, and how far the engine's logits are from transformers'.

`python tests/unit/tiny_architectures.py` prints the table of docs/architectures.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from impl.engine.architecture import TransformerConfig
from impl.engine.kv_cache import KVCache
from impl.engine.operators import Operators
from impl.engine.token_batch import Segment, TokenBatch
from impl.engine.token_tree import ROOT, TokenTree
from impl.engine.transformer import Transformer

CPU = torch.device("cpu")
WINDOW = 7  # shorter than the prompts, and than the trees are deep
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
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
OLMO = {key: value for key, value in SIZES.items() if key != "head_dim"}
LATE = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
# As on the hub, written by transformers 4.
GEMMA = {
    **SIZES,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 24,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def raw(**config: Any) -> Any:
    """A transformers config made from what a `config.json` says; ours is read from that itself."""
    made = AutoConfig.for_model(**config)
    made.raw = config
    return made


VARIANTS: Mapping[str, Any] = {
    "Llama 2": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "Llama, all heads with keys": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "Llama, one head with keys": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "Llama, attention bias": LlamaConfig(**SIZES, attention_bias=True),
    "Llama, linear rope scaling": raw(
        **SIZES, model_type="llama", rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "Llama 3.x": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "SmolLM2": raw(**SIZES, model_type="llama", tie_word_embeddings=True, rope_theta=100_000),
    "Mistral": MistralConfig(**SIZES, sliding_window=None),
    "Mistral, sliding window": MistralConfig(**SIZES, sliding_window=WINDOW),
    "Qwen2": Qwen2Config(**SIZES),
    "Qwen2.5": raw(**SIZES, model_type="qwen2", tie_word_embeddings=True, rope_theta=1e6),
    "Qwen2, late sliding windows": raw(**SIZES, model_type="qwen2", **LATE),
    "Qwen3": Qwen3Config(**{**SIZES, "head_dim": 16}, tie_word_embeddings=True),
    "Qwen3, late sliding windows": Qwen3Config(**SIZES, **LATE),
    "Gemma 3 text": raw(**GEMMA),
    "Gemma 3 text, scaled rope": raw(**GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "OLMo2": Olmo2Config(**OLMO),
}


@dataclass(frozen=True)
class Twins:
    """The same random weights in transformers and in the engine."""

    reference: Any
    ours: Transformer

    @torch.no_grad()
    def want(self, tokens: list[int]) -> torch.Tensor:
        """The reference's logits [tokens, vocabulary], in one pass."""
        return self.reference(torch.tensor([tokens]), use_cache=False).logits[0]

    def feed(self, cache: KVCache, parts: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """Our logits behind the tokens of (slot, start, tokens) parts."""
        return self.ours.forward(TokenBatch.causal(parts), cache)

    def feed_tree(self, cache: KVCache, tree: TokenTree, first: int = 0) -> torch.Tensor:
        """Our logits behind the nodes of a tree from `first` on, in slot 0."""
        segment = Segment(0, tree.trunk + first, len(tree) - first, tree.mask(first))
        batch = TokenBatch.pack(tree.tokens[first:], tree.positions(first), [segment])
        return self.ours.forward(batch, cache)


def build(
    config: Any, engine: type[Transformer] = Transformer, operators: Operators | None = None
) -> Twins:
    """A random model in float32 whose norms and biases are not at their neutral values."""
    torch.manual_seed(7)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    for name, parameter in reference.named_parameters():
        if name.endswith("bias") or "norm" in name:
            mean = 1.0 if "norm" in name and config.model_type != "gemma3_text" else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
    parsed = TransformerConfig.from_hf(getattr(config, "raw", None) or config.to_dict())
    weights = reference.state_dict()
    ours = engine.from_weights(parsed, weights, dtype=torch.float32, operators=operators)
    return Twins(reference, ours)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()


def largest(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max())


def one_pass(twins: Twins) -> float:
    tokens = tokens_of(64)
    got = twins.feed(twins.ours.new_cache(1, 64), [(0, 0, tokens)])
    return largest(got, twins.want(tokens))


def prefill_and_steps(twins: Twins) -> float:
    tokens, cache = tokens_of(64), twins.ours.new_cache(2, 96)
    twins.ours.prefill(cache, 1, tokens[:40])
    got = [twins.feed(cache, [(1, i, tokens[i : i + 1])]) for i in range(40, 64)]
    return largest(torch.cat(got), twins.want(tokens)[40:])


def tree_and_gather(twins: Twins) -> float:
    """A tree grown over two passes, deeper than the window; then one branch of it goes on."""
    context, cache = tokens_of(20), twins.ours.new_cache(1, 96)
    twins.ours.prefill(cache, 0, context)
    tree, parent, branches = TokenTree(20, capacity=40), ROOT, dict[int, list[int]]()
    for depth in range(WINDOW + 3):  # a trunk with a sibling beside each of its nodes
        for token in (depth + 30, depth + 60):
            node = tree.add(token, parent)
            branches[node] = [*branches.get(parent, []), token]
        parent = node - 1
    got, first = [twins.feed_tree(cache, tree)], len(tree)
    for token in (5, 6):
        node = tree.add(token, parent)
        branches[node] = [*branches[parent], token]
    got.append(twins.feed_tree(cache, tree, first))
    want = [twins.want(context + branch)[-1] for branch in branches.values()]
    path = [*range(0, first, 2), node]
    cache.gather(0, tree.cells(path))
    more = tokens_of(3, seed=3)
    got.append(twins.feed(cache, [(0, 20 + len(path), more)]))
    want += twins.want([*context, *branches[node], *more])[-3:]
    return largest(torch.cat(got), torch.stack(want))


def rollback(twins: Twins) -> float:
    tokens, cache = tokens_of(40), twins.ours.new_cache(1, 96)
    twins.ours.prefill(cache, 0, tokens[:30])
    twins.feed(cache, [(0, 30, tokens_of(20, seed=9))])
    cache.truncate(0, 50)
    cache.truncate(0, 25)
    got = twins.feed(cache, [(0, 25, tokens[25:])])
    return largest(got, twins.want(tokens)[25:])


def batch(twins: Twins) -> float:
    """Three sequences of different lengths get different numbers of tokens in one pass."""
    cache = twins.ours.new_cache(3, 64)
    contexts = {2: tokens_of(5, 1), 0: tokens_of(31, 2), 1: tokens_of(1, 3)}
    new = {2: tokens_of(3, 4), 0: tokens_of(1, 5), 1: tokens_of(6, 6)}
    for slot, context in contexts.items():
        twins.ours.prefill(cache, slot, context)
    got = twins.feed(cache, [(s, len(contexts[s]), new[s]) for s in (2, 0, 1)])
    want = [twins.want(contexts[s] + new[s])[-len(new[s]) :] for s in (2, 0, 1)]
    return largest(got, torch.cat(want))


CHECKS: tuple[Callable[[Twins], float], ...] = (
    one_pass,
    prefill_and_steps,
    tree_and_gather,
    rollback,
    batch,
)


def greedy(twins: Twins, prompt: list[int], count: int) -> list[int]:
    """Our greedy continuation, token by token."""
    tokens, cache = list(prompt), twins.ours.new_cache(1, len(prompt) + count)
    twins.ours.prefill(cache, 0, tokens[:-1])
    for _ in range(count):
        logits = twins.feed(cache, [(0, len(tokens) - 1, tokens[-1:])])
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def reference_greedy(twins: Twins, prompt: list[int], count: int) -> list[int]:
    """transformers' own, with its own cache."""
    limits = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
    out = twins.reference.generate(torch.tensor([prompt]), pad_token_id=0, **limits)
    return out[0, len(prompt) :].tolist()


def main() -> None:
    columns = ["architecture", *(check.__name__.replace("_", " ") for check in CHECKS)]
    rows = [columns, ["---"] * len(columns)]
    for name, config in VARIANTS.items():
        twins = build(config)
        rows.append([name, *(f"{check(twins):.1e}" for check in CHECKS)])
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
