"""Small GGUF files for tests: a model's Hugging Face weights written the way llama.cpp does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# As gguf-py's constants name a block's norms by what they do; the same for every architecture.
NORMS = {
    "llama": {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "gemma3_text": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class Vocabulary:
    """What goes into tokenizer.ggml.*"""

    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=lambda: ["a b"])
    model: str = "gpt2"
    pre: str = "qwen2"
    bos: int | None = None
    eos: int | None = None
    add_bos: bool | None = None
    scores: list[float] | None = None
    space_prefix: bool | None = None
    chat_template: str | None = None


def plain_vocabulary(size: int) -> Vocabulary:
    """The 256 byte tokens, one merge, an end token and padding up to `size`."""
    tokens = [*byte_tokens(), "ab", "<|im_end|>"]
    types = [NORMAL] * 257 + [CONTROL]
    padding = size - len(tokens)
    tokens += [f"[PAD{i}]" for i in range(padding)]
    return Vocabulary(tokens, types + [UNUSED] * padding, eos=257)


def byte_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def gguf_name(name: str, model_type: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    module, kind = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{(MODULES | NORMS.get(model_type, NORMS['llama']))[inner]}.{kind}"


def neighbouring_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows 0, 1, .. n-1 in the order 0, n/2, 1, n/2 + 1, ..: rotary pairs adjacent."""
    out = np.empty_like(rows)
    n = len(rows) // heads
    for head in range(heads):
        for i in range(n // 2):
            out[head * n + 2 * i] = rows[head * n + i]
            out[head * n + 2 * i + 1] = rows[head * n + i + n // 2]
    return out


def write_model(
    path: Path,
    config: Any,
    weights: dict[str, torch.Tensor],
    vocabulary: Vocabulary | None = None,
    extra: dict[str, np.ndarray] | None = None,
    quantised: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Writes a model in float32.

    Args:
        config: the model's Hugging Face config.
        weights: by Hugging Face name.
        extra: more tensors, by GGUF name.
        quantised: bytes and type of tensors that replace those of the same GGUF name.
    """
    kind = config.model_type
    writer = gguf.GGUFWriter(path, kind.removesuffix("_text"))
    _write_hyperparameters(writer, config)
    _write_vocabulary(writer, vocabulary or plain_vocabulary(config.vocab_size))
    tensors = dict(extra or {})
    for name, weight in weights.items():
        rows = weight.float().numpy()
        if kind == "llama" and ".q_proj" in name:
            rows = neighbouring_pairs(rows, config.num_attention_heads)
        if kind == "llama" and ".k_proj" in name:
            rows = neighbouring_pairs(rows, config.num_key_value_heads)
        if kind == "gemma3_text" and "norm" in name:
            rows = rows + 1
        tensors[gguf_name(name, kind)] = rows
    for name, rows in tensors.items():
        data, raw_dtype = (quantised or {}).get(name, (rows, None))
        writer.add_tensor(name, data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_hyperparameters(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def _write_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is None:
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.bos is not None:
        writer.add_bos_token_id(vocabulary.bos)
    if vocabulary.eos is not None:
        writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.add_bos is not None:
        writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
