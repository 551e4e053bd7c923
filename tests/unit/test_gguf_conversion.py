"""GGUF files become Hugging Face folders: weights, configuration, tokenizer.

Oracles: the block formulas of ggml written out here, the model that a file was written from,
transformers' own GGUF loading, and transformers' own Qwen2 tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    byte_tokens,
    write_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from harness.errors import ModelError
from impl.engine import gguf_conversion, loader

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
Kind = gguf.GGMLQuantizationType


def tiny(family: str, **changes: object) -> tuple[object, dict[str, torch.Tensor]]:
    """A random model's config and weights; the weights are exact in bfloat16, none is zero."""
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    model = model_class(config_class(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.3).bfloat16())
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    return model, weights


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79]])).logits


def half(block: bytes) -> np.float32:
    return np.float32(np.frombuffer(block, np.float16)[0])


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4]).astype(np.int32)


def high_bits(block: bytes) -> np.ndarray:
    word = int.from_bytes(block, "little")
    return np.array([word >> j & 1 for j in range(32)]) << 4


def u8(block: bytes) -> np.ndarray:
    return np.frombuffer(block, np.uint8)


def q4_0(b: bytes) -> np.ndarray:
    return half(b[:2]) * (nibbles(u8(b[2:])) - 8).astype(np.float32)


def q4_1(b: bytes) -> np.ndarray:
    return half(b[:2]) * nibbles(u8(b[4:])).astype(np.float32) + half(b[2:4])


def q5_0(b: bytes) -> np.ndarray:
    return half(b[:2]) * ((nibbles(u8(b[6:])) | high_bits(b[2:6])) - 16).astype(np.float32)


def q8_0(b: bytes) -> np.ndarray:
    return half(b[:2]) * np.frombuffer(b[2:], np.int8).astype(np.float32)


def q4_k(b: bytes) -> np.ndarray:
    """256 weights: 8 groups of 32 with a 6-bit scale and a 6-bit minimum each."""
    d, d_min, s, q = half(b[:2]), half(b[2:4]), u8(b[4:16]).astype(int), u8(b[16:])
    out = []
    for j in range(8):
        if j < 4:
            scale, minimum = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
            minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4
        chunk = q[j // 2 * 32 : j // 2 * 32 + 32]
        values = chunk & 15 if j % 2 == 0 else chunk >> 4
        scaled = (d * np.float32(scale)) * values.astype(np.float32)
        out.append(scaled - d_min * np.float32(minimum))
    return np.concatenate(out)


def q6_k(b: bytes) -> np.ndarray:
    """256 weights of 6 bits: 4 low in ql, 2 high in qh; an int8 scale for each 16."""
    ql, qh = u8(b[:128]).astype(int), u8(b[128:192]).astype(int)
    scales, d = np.frombuffer(b[192:208], np.int8), half(b[208:])
    out = np.empty(256, np.float32)
    for i in range(256):
        n, r, c = i // 128, i % 128 // 32, i % 32
        low = ql[64 * n + 32 * (r % 2) + c] >> (4 * (r // 2)) & 15
        high = qh[32 * n + c] >> (2 * r) & 3
        out[i] = (d * np.float32(scales[i // 16])) * np.float32((low | high << 4) - 32)
    return out


# type -> (bytes of a block, where its half-precision numbers are, formula)
FORMULAS = {
    Kind.Q4_0: (18, (0,), q4_0),
    Kind.Q4_1: (20, (0, 2), q4_1),
    Kind.Q5_0: (22, (0,), q5_0),
    Kind.Q8_0: (34, (0,), q8_0),
    Kind.Q4_K: (144, (0, 2), q4_k),
    Kind.Q6_K: (210, (208,), q6_k),
}


def random_blocks(kind: Kind, rows: int, blocks: int) -> np.ndarray:
    """Random bytes with sensible scales, so that every bit of the format matters."""
    size, halves, _ = FORMULAS[kind]
    generator = np.random.default_rng(kind)
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in halves:
        scale = generator.uniform(-0.1, 0.1, (rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("chunk", [1 << 24, 700])
def test_quantised_tensor_follows_its_block_formula(kind, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_conversion, "_CHUNK_ELEMENTS", chunk)  # rows in one chunk, or in many
    model, weights = tiny("qwen2", intermediate_size=512)
    size, _, formula = FORMULAS[kind]
    data = random_blocks(kind, 64, 512 // (32 if size < 100 else 256))
    write_model(
        tmp_path / "m.gguf",
        model.config,
        weights,
        quantised={"blk.1.ffn_down.weight": (data, kind)},
    )
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    got = loader.read_weights(folder)["model.layers.1.mlp.down_proj.weight"]
    expected = np.stack(
        [
            np.concatenate([formula(block.tobytes()) for block in row.reshape(-1, size)])
            for row in data
        ]
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_tensor(kind, tmp_path):
    model, weights = tiny("qwen2")
    name = "model.layers.0.mlp.up_proj.weight"
    values = weights[name]
    data = (
        values.half().numpy() if kind is Kind.F16 else values.bfloat16().view(torch.uint8).numpy()
    )
    quantised = {"blk.0.ffn_up.weight": (data, kind)}
    write_model(tmp_path / "m.gguf", model.config, weights, quantised=quantised)
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    expected = values.half().bfloat16() if kind is Kind.F16 else values.bfloat16()
    assert torch.equal(loader.read_weights(folder)[name], expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 5e5}}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6}}),
    ],
)
def test_converted_model_computes_what_the_original_does(family, changes, tmp_path):
    for theta in changes.get("rope_parameters", {}).values():
        changes = {**changes, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    model, weights = tiny(family, **changes)
    write_model(tmp_path / "m.gguf", model.config, weights)
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(converted), logits(model))
    stored = loader.read_weights(folder)
    assert ("lm_head.weight" in stored) == (not model.config.tie_word_embeddings)
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=converted)
    for name, tensor in theirs["tensors"].items():
        if not name.endswith("bias"):  # transformers forgets to un-permute llama's biases
            assert torch.equal(tensor.bfloat16(), stored[name]), name


def test_head_equal_to_the_embedding_is_not_written_twice(tmp_path):
    model, weights = tiny("qwen2", tie_word_embeddings=True)
    head = {"output.weight": weights["model.embed_tokens.weight"].numpy()}
    write_model(tmp_path / "m.gguf", model.config, weights, extra=head)
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    assert "lm_head.weight" not in loader.read_weights(folder)
    assert loader.read_config(folder)["tie_word_embeddings"] is True


def llama3_factors(head_dim: int, factor: float) -> np.ndarray:
    """By how much transformers slows each rotary frequency of Llama 3."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**{**SHAPE, "head_dim": head_dim}, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_rope_scaling_is_recognised(tmp_path):
    model, weights = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    factors = {"rope_freqs.weight": llama3_factors(16, factor=32.0)}
    write_model(tmp_path / "m.gguf", model.config, weights, extra=factors)
    config = loader.read_config(loader.prepare(tmp_path / "m.gguf", tmp_path / "cache"))
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_factors_are_refused(tmp_path):
    model, weights = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    factors = llama3_factors(16, factor=32.0)
    factors[5] *= 1.01
    write_model(tmp_path / "m.gguf", model.config, weights, extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is no Llama-3 scaling"):
        loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")


MERGES = ["1 2", "12 3", "123 4", "a b", "ab c", "Ġ 1", "e Ì", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = [
    "héllo, wörld: 漢字 かな 한국어 🙂👩‍👩‍👧",
    "x = 3.14e-10;  // tab\tand\r\n\n   spaces   ",
    "DON'T don't I'LL abc abcab 1234567 ٣٤٥ ½",
    "def f(n):\n\treturn {k: v for k, v in n.items()}  # ok\n",
]


def vocabulary(pre: str) -> Vocabulary:
    pieces = ["".join(merge.split()) for merge in MERGES]
    tokens = [*byte_tokens(), *pieces]
    types = [NORMAL] * len(tokens)
    tokens += ["<|im_start|>", "<|im_end|>", "<tool>", "[PAD]"]
    types += [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    start = len(tokens) - 4
    return Vocabulary(
        tokens, types, MERGES, pre=pre, bos=start, eos=start + 1, chat_template=TEMPLATE
    )


def converted_tokenizer(tmp_path: Path, vocab: Vocabulary) -> Path:
    model, weights = tiny("qwen2", vocab_size=len(vocab.tokens))
    write_model(tmp_path / "m.gguf", model.config, weights, vocab)
    return loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")


def test_qwen2_tokenizer_agrees_with_transformers(tmp_path):
    vocab = vocabulary("qwen2")
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocab))
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    theirs = Qwen2Tokenizer(vocab=ids, merges=[tuple(merge.split()) for merge in MERGES])
    for text in [*TEXTS, "e\u0301 decomposed"]:
        assert tokenizer(text).input_ids == theirs(text).input_ids
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS


def test_smollm_tokenizer_splits_digits_and_keeps_gpt2_spaces(tmp_path):
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocabulary("smollm")))
    assert tokenizer.tokenize("abc 123") == ["abc", "Ġ", "1", "2", "3"]
    assert tokenizer("e\u0301").input_ids != tokenizer("é").input_ids  # no normalisation
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS


def test_gpt2_tokenizer_merges_digits_with_their_space(tmp_path):
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocabulary("gpt-2")))
    assert tokenizer.tokenize("abc1234 1") == ["abc", "1234", "Ġ1"]


def test_llama_tokenizer_cuts_digits_in_threes_and_prepends_bos(tmp_path):
    vocab = vocabulary("llama-bpe")
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocab))
    assert tokenizer.tokenize("12341") == ["123", "4", "1"]
    assert tokenizer("ab").input_ids == [vocab.bos, vocab.tokens.index("ab")]


def test_bos_is_left_out_where_the_file_says_so(tmp_path):
    vocab = vocabulary("llama-bpe")
    vocab.add_bos = False
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocab))
    assert tokenizer("ab").input_ids == [vocab.tokens.index("ab")]


def test_special_tokens_template_and_end_ids(tmp_path):
    vocab = vocabulary("qwen2")
    folder = converted_tokenizer(tmp_path, vocab)
    for tokenizer in (loader.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)):
        assert tokenizer("<|im_start|>ab<|im_end|><tool>").input_ids == [
            vocab.bos,
            vocab.tokens.index("ab"),
            vocab.eos,
            vocab.tokens.index("<tool>"),
        ]
        assert (
            tokenizer.decode([vocab.bos, vocab.tokens.index("ab")], skip_special_tokens=True)
            == "ab"
        )
        assert "[PAD]" not in tokenizer.get_vocab()
        text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
        assert text == "<|im_start|>ab<|im_end|>"
        assert tokenizer.eos_token_id == vocab.eos
    assert loader.eos_token_ids(folder) == {vocab.eos}


def test_well_known_end_tokens_end_too(tmp_path):
    vocab = vocabulary("qwen2")
    vocab.tokens[-1], vocab.types[-1] = "<|endoftext|>", CONTROL
    folder = converted_tokenizer(tmp_path, vocab)
    assert loader.eos_token_ids(folder) == {vocab.eos, len(vocab.tokens) - 1}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        vocab.eos,
        len(vocab.tokens) - 1,
    ]


def test_config_numbers_are_the_decimals_that_were_meant(tmp_path):
    model, weights = tiny("llama", rms_norm_eps=1e-5)
    write_model(tmp_path / "m.gguf", model.config, weights)
    config = loader.read_config(loader.prepare(tmp_path / "m.gguf", tmp_path / "cache"))
    assert config["rms_norm_eps"] == 1e-5  # float32 holds 9.99999974e-06
    expected = {name: value for name, value in SHAPE.items() if name != "rms_norm_eps"}
    assert {name: config[name] for name in expected} == expected
    assert config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported; supported are llama, qwen2"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"model": "llama"}, "tokenizer 'llama' with"),
    ],
)
def test_unsupported_files_are_named(changes, message, tmp_path):
    vocab = vocabulary("qwen2")
    model, weights = tiny("qwen2", vocab_size=len(vocab.tokens))
    for name, value in changes.items():
        setattr(model.config if name == "model_type" else vocab, name, value)
    write_model(tmp_path / "m.gguf", model.config, weights, vocab)
    with pytest.raises(ModelError, match=message):
        loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")


def test_unknown_tensor_is_refused(tmp_path):
    model, weights = tiny("qwen2")
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    write_model(tmp_path / "m.gguf", model.config, weights, extra=extra)
    with pytest.raises(
        ModelError, match=r"blk\.0\.attn_q_norm\.weight is not part of a plain qwen2"
    ):
        loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")


def test_tensor_without_dequantisation_is_named(tmp_path):
    model, weights = tiny("qwen2")
    data = np.ones((96, 64), np.int8)
    quantised = {"blk.0.ffn_up.weight": (data, Kind.I8)}
    write_model(tmp_path / "m.gguf", model.config, weights, quantised=quantised)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight is I8, not supported"):
        loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")


@pytest.mark.parametrize("kept", [0, 3, 200, 0.5, 0.99])
def test_truncated_file_is_refused_in_one_line(kept, tmp_path):
    model, weights = tiny("qwen2")
    whole = write_model(tmp_path / "m.gguf", model.config, weights).read_bytes()
    end = kept if isinstance(kept, int) else int(len(whole) * kept)
    (tmp_path / "cut.gguf").write_bytes(whole[:end])
    with pytest.raises(ModelError, match=r"cut\.gguf: damaged or not a GGUF file") as caught:
        loader.prepare(tmp_path / "cut.gguf", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "converted").rglob("config.json")) == []
