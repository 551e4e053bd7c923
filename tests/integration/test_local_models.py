"""`harness run --target PATH --draft PATH` on snapshots as the hub's cache keeps them.

Random weights in shards behind an index, every file a link to a blob; outputs as transformers'.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import harness.tiny
from harness.cli import cli
from harness.store import read_run

TINY = Path(harness.tiny.__path__[0])
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _cores_and_threads() -> Iterator[None]:
    """The process's cores and threads as before."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def snapshot(cache: Path, name: str, kind: str, seed: int, **changes: Any) -> Path:
    """A random model of `kind` in `cache`, laid out as huggingface_hub does; returns its path."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))
    saved = cache / "saved" / name
    model.save_pretrained(saved, max_shard_size="100KB")
    for file in TOKENIZER:
        shutil.copy(TINY / "target" / file, saved)
    repository = cache / f"models--random--{name}"
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in saved.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (folder / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return folder


def run(target: Path, draft: Path, out: Path, *options: str) -> Result:
    methods = ("--methods", "ar,sd,tree")
    arguments = ("--dtype", "float32", *methods, "--datasets", "mini", "--prompts", "2")
    models = ("--target", str(target), "--draft", str(draft), "--cache-dir", str(out.parent / "c"))
    limits = ("--max-new-tokens", "12", "--raw", "--out", str(out))
    return CliRunner().invoke(cli, ["run", "--no-isolate", *models, *arguments, *limits, *options])


def expected(folder: Path, prompt: str) -> list[int]:
    """transformers' greedy continuation up to the first end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def assert_outputs_are_transformers(out: Path, target: Path) -> None:
    from harness.prompts import load_prompts

    requests = read_run(out).requests
    prompts = load_prompts("mini", 2).prompts
    assert set(requests["method"]) == {"ar", "sd", "tree"}
    for prompt in prompts:
        rows = requests[requests["prompt_index"] == prompt.index]
        assert len(rows) == 4  # ar, its control, sd, tree
        for ids in rows["output_ids"]:
            assert list(ids) == expected(target, prompt.messages[-1].content)


def test_a_sharded_snapshot_goes_through_a_run(tmp_path: Path) -> None:
    windows = {"sliding_window": 5, "query_pre_attn_scalar": 16}  # shorter than the prompts
    target = snapshot(tmp_path, "target", "gemma3_text", seed=1, **windows)
    draft = snapshot(tmp_path, "draft", "qwen3", seed=2, num_hidden_layers=1)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2
    result = run(target, draft, tmp_path / "run")
    assert result.exit_code == 0, result.output
    pair = read_run(tmp_path / "run").manifest["pair"]
    assert (pair["name"], pair["engine"]) == ("local", "lean")
    assert pair["target"]["source"] == str(target)
    assert_outputs_are_transformers(tmp_path / "run", target)


def test_an_architecture_that_only_transformers_has(tmp_path: Path) -> None:
    target = snapshot(tmp_path, "target", "granite", seed=1)
    draft = snapshot(tmp_path, "draft", "llama", seed=2, num_hidden_layers=1)
    result = run(target, draft, tmp_path / "run")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("error:")]
    assert "model_type: 'granite' is not supported by the lean engine" in line
    assert "llama, mistral, qwen2, qwen3, gemma3_text, olmo2" in line
    assert "--engine hf" in line
    result = run(target, draft, tmp_path / "run", "--engine", "hf")
    assert result.exit_code == 0, result.output
    pair = read_run(tmp_path / "run").manifest["pair"]
    assert (pair["engine"], pair["target"]["operators"]) == ("hf", "transformers")
    assert_outputs_are_transformers(tmp_path / "run", target)


def test_the_lean_engines_quantisation_is_refused_with_engine_hf(tmp_path: Path) -> None:
    options = ("--engine", "hf", "--draft-quantization", "int8")
    result = run(tmp_path, tmp_path, tmp_path / "run", *options)
    assert result.exit_code == 2
    assert "draft_quantization: is the lean engine's" in result.output
