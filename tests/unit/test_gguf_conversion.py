"""GGUF files become Hugging Face folders: weights, configuration, tokenizer.

Oracles: the block formulas of ggml written out here, the model that a file was written from,
transformers' own GGUF loading, and transformers' own Qwen2 tokenizer.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    byte_tokens,
    write_model,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaTokenizer,
    LlamaConfig,
    LlamaTokenizer,
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
GEMMA = {
    "num_hidden_layers": 6,  # of which the last sees everything
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 3,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def tiny(family: str, **changes: object) -> tuple[object, dict[str, torch.Tensor]]:
    """A random model's config and weights; the weights are exact in bfloat16, none is zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
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


ALL_KINDS = [
    kind
    for kind, size in gguf.GGML_QUANT_SIZES.items()
    if kind in gguf.quants._type_traits and size[0] > 1
]


def finite_blocks(kind: Kind, values: int) -> np.ndarray:
    """Random blocks of `values` values in all that dequantise to finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind)
    data = generator.integers(0, 256, (40 * values // block, size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # a random scale may be infinite
        decoded = np.abs(gguf.dequantize(data, kind))
    return data[(decoded < 1e30).all(axis=1)][: values // block]


def quantised(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random weights as gguf quantises them, or random blocks where it does not."""
    weights = np.random.default_rng(3).normal(size=(rows, columns)).astype(np.float32)
    try:
        return gguf.quantize(weights, kind)
    except NotImplementedError:
        return finite_blocks(kind, rows * columns).reshape(rows, -1)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_every_quantisation_that_gguf_reads_is_converted(kind, tmp_path):
    model, weights = tiny("qwen2", intermediate_size=512)
    data = quantised(kind, 64, 512)
    expected = gguf.dequantize(data, kind)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 2
    blocks = {"blk.1.ffn_down.weight": (data, kind)}
    write_model(tmp_path / "m.gguf", model.config, weights, quantised=blocks)
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    got = loader.read_weights(folder)["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(got, torch.from_numpy(expected).bfloat16())


def test_the_quantisations_of_published_files_are_among_them():
    published = (
        "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4 IQ1_S IQ1_M"
    )
    published += " IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    assert {kind.name for kind in ALL_KINDS} >= set(published.split())


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
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("olmo2", {"tie_word_embeddings": False}),
        ("gemma3_text", GEMMA),
        ("gemma3_text", {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_converted_model_computes_what_the_original_does(family, changes, tmp_path):
    for theta in list(changes.get("rope_parameters", {}).values()):
        changes = {**changes, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    model, weights = tiny(family, **changes)
    write_model(tmp_path / "m.gguf", model.config, weights)
    folder = loader.prepare(tmp_path / "m.gguf", tmp_path / "cache")
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(converted), logits(model))
    stored = loader.read_weights(folder)
    assert ("lm_head.weight" in stored) == (not model.config.tie_word_embeddings)
    if family not in ("llama", "qwen2"):
        return  # transformers does not read these tensors, or their names, from GGUF files
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


PIECES = [*"▁helowrdabé", *("▁▁", "he", "ll", "hell", "hello", "▁hello", "wo", "wor", "ld")]
PIECES += ["▁world", "ab", "▁a", "▁ab"]
SPM_TEXTS = ["hello world", "  hello\n\tab", "é漢字🙂 hellohello", "a", " ", "heab  ab world  "]


def sentencepiece_vocabulary(*, space_prefix: bool) -> Vocabulary:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    tokens = [*special, *PIECES, "<tool>"]
    order = np.random.default_rng(1).permutation(len(tokens))  # scores are no longer by id
    return Vocabulary(
        tokens, types, model="llama", pre="default", bos=1, eos=2,
        scores=[-float(i) for i in order], space_prefix=space_prefix,
    )  # fmt: skip


def merged_best_first(text: str, vocab: Vocabulary) -> list[str]:
    """SentencePiece's BPE, by its definition: merge the best neighbours until no piece is left."""
    score = dict(zip(vocab.tokens, vocab.scores, strict=True))
    pieces = list(text)
    while pairs := [
        (-score[p + q], i) for i, (p, q) in enumerate(pairwise(pieces)) if p + q in score
    ]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_merges_the_best_piece_first(space_prefix, tmp_path):
    vocab = sentencepiece_vocabulary(space_prefix=space_prefix)
    tokenizer = loader.load_tokenizer(converted_tokenizer(tmp_path, vocab))
    for text in SPM_TEXTS:
        spaced = ("▁" if space_prefix else "") + text.replace(" ", "▁")
        assert tokenizer.tokenize(text) == merged_best_first(spaced, vocab), text
        ids = tokenizer(text).input_ids
        assert ids[0] == vocab.bos
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    ids = tokenizer("<s><tool></s>").input_ids
    assert [i for i in ids if vocab.types[i] != NORMAL] == [1, 1, len(vocab.tokens) - 1, 2]


@pytest.mark.parametrize(
    ("tokenizer_class", "space_prefix"), [(LlamaTokenizer, True), (GemmaTokenizer, False)]
)
def test_sentencepiece_agrees_with_transformers(tokenizer_class, space_prefix, tmp_path):
    vocab = sentencepiece_vocabulary(space_prefix=space_prefix)
    folder = converted_tokenizer(tmp_path, vocab)
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    theirs = tokenizer_class(
        vocab=content["vocab"], merges=[tuple(m) for m in content["merges"]], bos_token="<s>",
        eos_token="</s>",
    )  # fmt: skip
    ours = loader.load_tokenizer(folder)
    for text in SPM_TEXTS:
        if space_prefix and text.startswith(" "):
            continue  # SentencePiece puts its prefix there too, this class does not
        assert ours.tokenize(text) == theirs.tokenize(text), text
        ids = ours(text).input_ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True
        )


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
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are llama, qwen2"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"model": "t5"}, "tokenizer 't5' with"),
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
