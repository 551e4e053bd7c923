"""Folders in Hugging Face layout: what is read, what is refused, what is remembered."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from gguf_files import write_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.errors import ModelError
from impl.engine import gguf_conversion, loader
from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import TokenBatch

INDEX = "model.safetensors.index.json"


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def gguf_file(path: Path) -> Path:
    model = tiny_model()
    return write_model(path, model.config, model.state_dict())


def write_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if list(shards) != ["model.safetensors"]:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


SHARDS = {
    "model-1.safetensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16()},
    "model-2.safetensors": {"c": torch.zeros(5, dtype=torch.float16)},
}


def test_a_folder_is_returned_as_it_is(tmp_path):
    folder = write_folder(tmp_path / "m", SHARDS)
    assert loader.prepare(folder, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_weights_of_all_shards_are_read(tmp_path):
    weights = loader.read_weights(write_folder(tmp_path / "m", SHARDS))
    expected = {**SHARDS["model-1.safetensors"], **SHARDS["model-2.safetensors"]}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_weights_are_mapped_not_copied(tmp_path):
    tensor = {"a": torch.arange(300_000.0)}
    folder = write_folder(tmp_path / "m", {"model.safetensors": tensor})
    weights = loader.read_weights(folder)
    address = weights["a"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith("m/model.safetensors")
            return
    pytest.fail("address is not mapped")


def test_size_counts_every_stored_number(tmp_path):
    size = loader.weight_size(write_folder(tmp_path / "m", SHARDS))
    assert (size.parameters, size.bytes) == (6 + 4 + 5, 6 * 4 + 4 * 2 + 5 * 2)


def test_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", SHARDS)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: this shard .* is missing"):
        loader.prepare(folder, tmp_path / "cache")


def test_tensor_missing_from_its_shard_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", SHARDS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"d": "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-2\.safetensors: lacks d"):
        loader.read_weights(folder)


@pytest.mark.parametrize(
    "escape", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", 3]
)
def test_index_may_not_leave_the_folder(escape, tmp_path):
    folder = write_folder(tmp_path / "m", SHARDS)
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": escape}}))
    with pytest.raises(ModelError, match="no file of this folder"):
        loader.read_weights(folder)


def test_truncated_shard_is_named(tmp_path):
    folder = write_folder(tmp_path / "m", {"model.safetensors": {"a": torch.ones(100)}})
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        loader.read_weights(folder)
    shard.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        loader.weight_size(folder)


def test_pickled_weights_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m", {"model.safetensors": {"a": torch.ones(1)}})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled") as caught:
        loader.prepare(folder, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such model"):
        loader.prepare(tmp_path / "absent", tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a model"):
        loader.prepare(tmp_path / "a.bin", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        loader.prepare(tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model\.safetensors and no model\.safetensors\.index"):
        loader.prepare(tmp_path / "empty", tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        loader.load_tokenizer(tmp_path / "empty")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, {7, 8}),
        ({}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": 5}, {"eos_token_id": None}, {5}),
    ],
)
def test_eos_token_ids(generation, config, expected, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loader.eos_token_ids(tmp_path) == expected


def test_eos_of_the_tokenizer_where_nothing_else_names_one(tmp_path):
    folder = loader.prepare(gguf_file(tmp_path / "m.gguf"), tmp_path / "cache")
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    assert loader.eos_token_ids(folder) == {257}  # gguf_files.plain_vocabulary


def test_file_sum_is_remembered_until_the_file_changes(tmp_path):
    file, cache = tmp_path / "f", tmp_path / "cache"
    file.write_bytes(b"one")
    one = hashlib.sha256(b"one").hexdigest()
    assert loader.file_sha256(file, cache) == one
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"two")
    os.utime(file, ns=times)
    assert loader.file_sha256(file, cache) == one  # same size and time: not read again
    os.utime(file, ns=(times[0], times[1] + 1))
    assert loader.file_sha256(file, cache) == hashlib.sha256(b"two").hexdigest()
    for record in (cache / "sha256").iterdir():
        record.write_text("{")
    assert loader.file_sha256(file, cache) == hashlib.sha256(b"two").hexdigest()


def test_sum_of_the_weights(tmp_path):
    cache = tmp_path / "cache"
    single = write_folder(tmp_path / "s", {"model.safetensors": {"a": torch.ones(1)}})
    content = (single / "model.safetensors").read_bytes()
    assert loader.weights_sha256(single, cache) == hashlib.sha256(content).hexdigest()
    sharded = write_folder(tmp_path / "m", SHARDS)
    sums = [hashlib.sha256((sharded / name).read_bytes()).hexdigest() for name in SHARDS]
    listing = f"{sums[0]}  model-1.safetensors\n{sums[1]}  model-2.safetensors\n"
    assert loader.weights_sha256(sharded, cache) == hashlib.sha256(listing.encode()).hexdigest()
    source = gguf_file(tmp_path / "m.gguf")
    converted = loader.prepare(source, cache)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert converted.name == digest
    assert loader.weights_sha256(converted, cache) == digest


def test_a_file_is_converted_once(tmp_path, monkeypatch):
    source = gguf_file(tmp_path / "m.gguf")
    first = loader.prepare(source, tmp_path / "cache")
    monkeypatch.delattr(gguf_conversion, "convert")
    assert loader.prepare(source, tmp_path / "cache") == first


def test_interrupted_conversion_leaves_nothing_and_is_repeated(tmp_path, monkeypatch):
    source, cache = gguf_file(tmp_path / "m.gguf"), tmp_path / "cache"

    def interrupted(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert not list((cache / "converted").rglob(f"{folder.stem}/config.json"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_conversion, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.prepare(source, cache)
    assert not list((cache / "converted").rglob("config.json"))
    folder = loader.prepare(source, cache)
    left = folder.with_name(f"{folder.name}.unfinished")  # as a killed process leaves it
    folder.rename(left)
    assert loader.prepare(source, cache) == folder
    assert not left.exists()


def test_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    def full(_: Path, __: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_conversion, "convert", full)
    with pytest.raises(ModelError, match=r"No space left on device.*free some space"):
        loader.prepare(gguf_file(tmp_path / "m.gguf"), tmp_path / "cache")


def test_loaded_transformer_computes_what_transformers_does(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "m")
    ours = loader.load_transformer(tmp_path / "m", dtype=torch.float32)
    trimmed = loader.load_transformer(
        tmp_path / "m", dtype=torch.float32, head_ids=torch.tensor([5, 200, 7])
    )
    tokens = [3, 14, 15, 92]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    batch = TokenBatch.causal([(0, 0, tokens)])

    def run(transformer) -> torch.Tensor:
        cache: KVCache = transformer.new_cache(slots=1, cells=16)
        return transformer.forward(batch, cache)

    torch.testing.assert_close(run(ours), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(run(trimmed), expected[:, [5, 200, 7]], atol=1e-4, rtol=0)
