"""Writes what a GGUF file holds as a folder in Hugging Face layout, with bfloat16 weights.

Knows the container, the architectures and their tensor names; tokenizers are next door in
`gguf_tokenizer`. Dequantises in chunks of rows, so that memory stays modest for any model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import ModelError
from impl.engine import gguf_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt
    from gguf import ReaderTensor

_CHUNK_ELEMENTS = 1 << 24  # dequantised at a time: 64 MiB in float32


_PROJECTIONS: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **_NORMS_AFTER,
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class _Architecture:
    """How a GGUF architecture and its tensors are called by Hugging Face.

    Attributes:
        norms: GGUF name -> Hugging Face name of a block's norms.
        permuted_qk: q and k rows pair each rotary dimension with its neighbour.
        norm_offset: what the file has added to the weights of norms.
    """

    model_type: str
    class_name: str
    norms: Mapping[str, str]
    permuted_qk: bool = False
    norm_offset: float = 0.0


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _NORMS_BEFORE, permuted_qk=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _NORMS_BEFORE),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _NORMS_BEFORE | _HEAD_NORMS),
    "gemma3": _Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _NORMS_AROUND | _HEAD_NORMS, norm_offset=1.0
    ),
    "olmo2": _Architecture("olmo2", "Olmo2ForCausalLM", _NORMS_AFTER | _HEAD_NORMS),
}
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_MODEL_TENSORS: Mapping[str, str] = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class _GgufFile:
    """An open GGUF file of a supported architecture."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    def parameter(self, name: str, default: Any = None) -> Any:
        """A hyperparameter, such as `block_count`; without a default it has to be there."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ModelError(f"{self.path}: its metadata lacks {self.architecture}.{name}")
        return value


def convert(source: Path, folder: Path) -> None:
    """Writes config, generation config, tokenizer and `model.safetensors` into `folder`.

    Raises:
        ModelError: the file is damaged, or its architecture, a tensor, a quantisation or the
            tokenizer is not supported.
        OSError: the folder cannot be written.
    """
    file = _open(source)
    config = _model_config(file)
    names = _huggingface_names(file, tied=config["tie_word_embeddings"])
    gguf_tokenizer.write(file.metadata, folder, source=source)
    special_ids = gguf_tokenizer.special_ids(file.metadata)
    _write_json(folder / "config.json", config | special_ids)
    _write_json(folder / "generation_config.json", special_ids)
    _write_safetensors(folder / "model.safetensors", file, names)


def _open(path: Path) -> _GgufFile:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{path}: damaged or not a GGUF file ({error}); fetch it again") from error
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return _GgufFile(path, architecture, metadata, {t.name: t for t in reader.tensors})


def _model_config(file: _GgufFile) -> dict[str, Any]:
    """The Hugging Face config. `rope_theta` and `rope_scaling` as every release reads them."""
    architecture = _ARCHITECTURES[file.architecture]
    if _EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path}: tensor {_EMBEDDING} is missing; fetch the file again")
    hidden_size, vocab_size = (int(size) for size in file.tensors[_EMBEDDING].shape)
    heads = file.parameter("attention.head_count")
    head_dim = file.parameter("attention.key_length", 0) or file.parameter(
        "rope.dimension_count", hidden_size // heads
    )
    theta = _shortest_decimal(file.parameter("rope.freq_base", 10_000.0))
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": file.parameter("feed_forward_length"),
        "num_hidden_layers": file.parameter("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.parameter("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.parameter("context_length"),
        "rms_norm_eps": _shortest_decimal(file.parameter("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, theta, head_dim),
        "tie_word_embeddings": _tied(file),
    }
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture.model_type == "gemma3_text":
        del config["hidden_act"]
        config |= _gemma3_config(file, hidden_size // heads, head_dim)
    return config


def _gemma3_config(file: _GgufFile, hidden_per_head: int, head_dim: int) -> dict[str, Any]:
    """What the file leaves to its readers, as llama.cpp has it (`llm_load_hparams`, gemma3)."""
    largest = file.parameter("block_count") == 62  # 27B scales by another size than the rest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.parameter("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": hidden_per_head if largest else head_dim,
    }


def _tied(file: _GgufFile) -> bool:
    """Whether the output head is the embedding: absent, or the same bytes once more.

    A head of the same matrix in another quantisation is another head: it is what the publisher's
    file computes its logits with.
    """
    embedding, head = file.tensors[_EMBEDDING], file.tensors.get(_HEAD)
    if head is None:
        return True
    same_type = head.tensor_type == embedding.tensor_type
    return same_type and np.array_equal(head.data, embedding.data)


def _rope_scaling(file: _GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """A linear scaling, or Llama-3's, which GGUF stores as one factor for each rotary frequency.

    The constants of the latter are the same for every Llama 3.x but the factor; that the stored
    factors follow from them is checked (formula: `_compute_llama3_parameters` of transformers).
    """
    kind = file.parameter("rope.scaling.type", "none")
    if kind == "linear":
        factor = _shortest_decimal(file.parameter("rope.scaling.factor"))
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; use safetensors")
    if _ROPE_FACTORS not in file.tensors:
        return None
    stored = np.asarray(file.tensors[_ROPE_FACTORS].data, dtype=np.float64)
    factor, low, high, original_context = float(stored.max()), 1.0, 4.0, 8192
    turns = original_context / (2 * math.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(f"{file.path}: {_ROPE_FACTORS} is no Llama-3 scaling; use safetensors")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original_context,
    }


def _huggingface_names(file: _GgufFile, *, tied: bool) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor to write."""
    names, modules = {}, {**_PROJECTIONS, **_ARCHITECTURES[file.architecture].norms}
    for name in file.tensors:
        if name == _ROPE_FACTORS or (tied and name == _HEAD):
            continue
        layer = _LAYER_TENSOR.fullmatch(name)
        if name in _MODEL_TENSORS:
            names[name] = _MODEL_TENSORS[name]
        elif layer and layer[2] in modules:
            names[name] = f"model.layers.{layer[1]}.{modules[layer[2]]}.{layer[3]}"
        else:
            raise ModelError(
                f"{file.path}: tensor {name} is not part of a plain {file.architecture} model"
            )
    return names


def _write_safetensors(path: Path, file: _GgufFile, names: Mapping[str, str]) -> None:
    """Streams the tensors into one safetensors file: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, huggingface_name in names.items():
        tensor = file.tensors[name]
        start, end = end, end + 2 * int(tensor.n_elements)
        header[huggingface_name] = {
            "dtype": "BF16",
            "shape": [int(size) for size in reversed(tensor.shape)],
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    with path.open("wb") as output:
        output.write(len(encoded).to_bytes(8, "little"))
        output.write(encoded)
        for name in names:
            output.writelines(_bfloat16_chunks(file, file.tensors[name]))


def _bfloat16_chunks(file: _GgufFile, tensor: ReaderTensor) -> Iterator[bytes]:
    """The tensor's values in bfloat16 (rounded to nearest even), a chunk of rows at a time."""
    import gguf

    data = tensor.data  # [rows, bytes of a quantised row], or [rows, columns], or [columns]
    order = _row_order(file, tensor)
    offset = _ARCHITECTURES[file.architecture].norm_offset * tensor.name.endswith("norm.weight")
    rows = max(1, _CHUNK_ELEMENTS * len(data) // int(tensor.n_elements))
    for start in range(0, len(data), rows):
        chunk = data[start : start + rows] if order is None else data[order[start : start + rows]]
        try:
            values = gguf.dequantize(chunk, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{file.path}: {tensor.name} is {kind}, not supported") from error
        yield gguf.quantize(
            values - offset if offset else values, gguf.GGMLQuantizationType.BF16
        ).tobytes()


def _row_order(file: _GgufFile, tensor: ReaderTensor) -> npt.NDArray[np.int64] | None:
    """For each row of a Hugging Face q or k projection, the row of the GGUF tensor; else None.

    GGUF's llama pairs rotary dimension i with i + 1 of a head, Hugging Face with i + head_dim / 2.
    """
    layer = _LAYER_TENSOR.fullmatch(tensor.name)
    if not _ARCHITECTURES[file.architecture].permuted_qk or not layer:
        return None
    if layer[2] not in ("attn_q", "attn_k"):
        return None
    heads = file.parameter("attention.head_count")
    if layer[2] == "attn_k":
        heads = file.parameter("attention.head_count_kv", heads)
    rows = np.arange(len(tensor.data))
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _shortest_decimal(value: float) -> float:
    """The shortest decimal with the same float32: 1e-05 where GGUF holds 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
