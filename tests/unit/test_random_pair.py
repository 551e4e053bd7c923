"""Made-up weights: the shapes that transformers has, memory asked for before it is taken."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from harness import pairs, random_pair
from harness.decoder import Placement
from harness.errors import ModelError
from harness.random_pair import check_memory, make_up
from impl.engine import loader
from impl.engine.models import ModelSpec
from impl.engine.random_weights import RandomWeights
from impl.engine.token_batch import TokenBatch

TINY = Path(pairs.__file__).parent / "tiny"
SMALL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 600,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b"])
def test_a_declared_shape_becomes_a_folder_of_as_many_numbers(name, tmp_path):
    pair = pairs.find_pair(name)
    found = make_up(pair, tmp_path)
    for model, declared in ((found.target, pair.target), (found.draft, pair.draft)):
        weights = RandomWeights.of(model.folder, torch.bfloat16)  # counted by transformers
        stored = {name: shape.numel() for name, shape in weights.shapes.items()}
        if declared.shape.tied:
            del stored["lm_head.weight"]
        assert sum(stored.values()) == declared.shape.parameters == model.parameters
        assert model.weight_bytes == 2 * model.parameters
        assert model.source == f"random weights of the shape of pair {name}"
    assert loader.load_tokenizer(found.target.folder)("a b")["input_ids"]


def test_llama_3_2_1b_has_its_published_size():
    assert pairs.find_pair("llama-3.2-1b").target.shape.parameters == 1_235_814_400


def test_a_folder_with_a_config_alone_is_enough(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(SMALL))
    found = make_up(pairs.local_pair(str(tmp_path / "mine")), tmp_path / "cache")
    assert found.draft is None
    assert loader.read_config(found.target.folder) == SMALL
    tokenizer = (found.target.folder / "tokenizer.json").read_text()
    assert tokenizer == (TINY / "target" / "tokenizer.json").read_text()
    again = make_up(pairs.local_pair(str(tmp_path / "mine")), tmp_path / "cache")
    assert again == found


def test_the_models_of_a_made_up_folder_run_and_are_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    spec = ModelSpec(tmp_path, "float32", random=True)
    models = [spec.load(), spec.load()]  # target and draft process make up the same draft
    batch = TokenBatch.causal([(0, 0, [1, 2, 599])])
    logits = [model.forward(batch, model.new_cache(1, 8)) for model in models]
    assert torch.equal(*logits)
    assert logits[0].shape == (3, 600)
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0


def test_a_made_up_draft_keeps_the_lowest_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    spec = ModelSpec(tmp_path, "float32", head_size=9, random=True)
    assert spec.head_ids().tolist() == list(range(9))
    assert spec.load().vocabulary == spec.width() == 9


def test_weights_are_normal_and_no_two_rows_alike():
    shapes = MappingProxyType({"a.weight": torch.Size([300, 200]), "norm.weight": torch.Size([8])})
    weights = RandomWeights(shapes, torch.float32)
    matrix = weights["a.weight"]
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)  # 60,000 numbers: 0.3% is a sigma
    assert len(matrix.unique(dim=0)) == 300
    assert weights["norm.weight"].tolist() == [1.0] * 8
    assert set(weights) == set(shapes)


def test_memory_is_asked_for_before_anything_is_allocated(monkeypatch, tmp_path):
    found = make_up(pairs.find_pair("llama-3.1-70b"), tmp_path)  # 141 GB: nobody made them up
    monkeypatch.setattr(random_pair, "available_memory", lambda: {"host": 100 << 30})
    with pytest.raises(ModelError, match=r"weights: host needs 14\d\.\d GB .* 107\.4 GB free"):
        check_memory(found, context=2048, batch_size=1, placement=Placement())
    monkeypatch.setattr(random_pair, "available_memory", lambda: {"host": 200 << 30})
    check_memory(found, context=2048, batch_size=1, placement=Placement())
    with pytest.raises(ModelError, match="choose a smaller pair"):  # 0.33 MB of KV a token
        check_memory(found, context=2048, batch_size=100, placement=Placement())


def test_sizes_without_weights_are_no_pair_to_run(tmp_path):
    with pytest.raises(ModelError, match="has sizes and no weights; --weights random makes"):
        pairs.resolve(pairs.find_pair("llama-3.2-1b"), tmp_path)


def test_a_hub_id_without_a_shape_is_refused(tmp_path):
    with pytest.raises(ModelError, match="its sizes are not known before it is here"):
        make_up(pairs.local_pair("owner/name"), tmp_path)
