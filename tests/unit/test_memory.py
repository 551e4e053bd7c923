"""Memory of a pair: parameter counts by transformers, the rest by hand."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from harness import memory, pairs, sources
from harness.cli import cli
from harness.decoder import Placement
from harness.errors import ModelError, UsageError
from harness.memory import ModelNeed, Shape, device_needs, model_need

GB = 10**9


def published(model_type, shape):
    """The same sizes as a transformers config."""
    return AutoConfig.for_model(
        model_type,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )


@pytest.mark.parametrize("name", sorted(set(pairs.load_pairs()) - {"tiny", "smollm2-135m"}))
def test_parameters_are_those_that_transformers_counts(name):
    families = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
    family = next(kind for start, kind in families.items() if name.startswith(start))
    for model in pairs.find_pair(name).models.values():
        with torch.device("meta"):
            reference = AutoModelForCausalLM.from_config(published(family, model.shape))
        assert model.shape.parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("name", "role", "parameters"),  # as the hub's pages say of the safetensors
    [("llama-3.1-8b", "target", 8_030_261_248), ("llama-3.1-8b", "draft", 1_235_814_400),
     ("llama-3.1-70b", "target", 70_553_706_496), ("qwen3-32b", "target", 32_762_123_264),
     ("qwen3-8b", "target", 8_190_735_360), ("qwen2.5-7b", "target", 7_615_616_512),
     ("qwen2.5-7b", "draft", 494_032_768)],
)  # fmt: skip
def test_published_parameter_counts(name, role, parameters):
    assert pairs.find_pair(name).models[role].shape.parameters == parameters


def test_a_folders_own_config_gives_its_shape():
    model = pairs.find_pair("tiny").target
    from impl.engine.loader import weight_size

    folder = model.sources[0].path
    assert model.known_shape().parameters == weight_size(folder).parameters


def test_kv_and_weights_of_llama_3_1_8b():
    shape = pairs.find_pair("llama-3.1-8b").target.shape
    need = model_need(shape, "bfloat16", 2048, 4)
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token; 8192 tokens = 1 GiB
    assert need.kv_bytes == 1 << 30
    assert need.weight_bytes == 2 * 8_030_261_248
    with pytest.raises(UsageError, match="at least 1"):
        model_need(shape, "bfloat16", 0, 1)


def test_devices_hold_what_runs_on_them():
    target, draft = ModelNeed(0, 10 * GB, 2 * GB), ModelNeed(0, 1 * GB, 1 * GB)
    work = memory.WORKING_BYTES
    (host,) = device_needs(target, draft, {"host": 16 * GB + 2 * work})
    assert (host.device, host.need_bytes, host.fits) == ("host", 16 * GB + 2 * work, True)
    (host,) = device_needs(target, draft, {"host": 16 * GB + 2 * work - 1})
    assert not host.fits
    one, two = device_needs(target, draft, {"host": 0, "cuda:0": 14 * GB + work, "cuda:1": 2 * GB})
    assert (one.device, one.need_bytes, one.fits) == ("cuda:0", 14 * GB + work, True)
    assert (two.device, two.need_bytes, two.fits) == ("cuda:1", 2 * GB + work, False)
    (alone,) = device_needs(target, None, {"host": 12 * GB + work})
    assert (alone.need_bytes, alone.fits) == (12 * GB + work, True)


def test_four_devices_share_a_target_and_one_has_the_draft():
    target, draft = ModelNeed(0, 140 * GB, 4 * GB, 2 * GB), ModelNeed(0, 2 * GB, 1 * GB, GB)
    where = Placement(target_devices=tuple(f"cuda:{i}" for i in range(4)), draft_device="cuda:4")
    free = {"host": 0} | {f"cuda:{i}": 80 * GB for i in range(5)}
    found = device_needs(target, draft, free, where)
    work = memory.WORKING_BYTES
    each = 36 * GB + 2 * GB + work  # a quarter of 144, and the embedding
    assert [(one.device, one.need_bytes) for one in found] == [
        ("cuda:0", each + 3 * GB),  # synchronous methods draft here
        ("cuda:1", each),
        ("cuda:2", each),
        ("cuda:3", each),
        ("cuda:4", 3 * GB + work),
    ]
    assert all(one.fits for one in found)
    shared = Placement(target_devices=("cuda:0",), draft_device="cuda:0")
    (one,) = device_needs(target, draft, free, shared)
    assert (one.need_bytes, one.fits) == (144 * GB + 6 * GB + 2 * work, False)
    several = Placement(target_devices=("cuda:0",), draft_device="cuda:3,cuda:4")
    assert [(one.device, one.need_bytes) for one in device_needs(target, draft, free, several)] == [
        ("cuda:0", 147 * GB + work),
        ("cuda:3", 3 * GB + work),
        ("cuda:4", 3 * GB + work),
    ]
    gone = Placement(target_devices=("cuda:7",), draft_device="cpu")
    assert [one.fits for one in device_needs(target, draft, free, gone)] == [False, False]


def test_check_is_asked_for_a_placement(monkeypatch):
    free = {"host": 0} | {f"cuda:{i}": 80 * GB for i in range(5)}
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    asked = ["pairs", "check", "llama-3.1-70b"]
    alone = CliRunner().invoke(cli, asked)
    assert alone.exit_code == 1
    assert "cuda:0  does not fit" in alone.stdout
    where = ["--target-devices", "cuda:0-3", "--draft-device", "cuda:4"]
    assert CliRunner().invoke(cli, [*asked, *where]).stdout.count("  fits: needs") == 5
    wrong = CliRunner().invoke(cli, [*asked, "--target-devices", "cuda:3-0"])
    assert "target_devices: cuda:3-0 counts down" in wrong.stderr


@pytest.mark.parametrize(("free", "fits"), [(500 * GB, True), (100 * GB, False)])
def test_check_says_whether_it_fits_and_how_to_get_gated_weights(monkeypatch, free, fits):
    monkeypatch.setattr(memory, "available_memory", lambda: {"host": free})
    result = CliRunner().invoke(cli, ["pairs", "check", "llama-3.1-70b", "--json"])
    assert result.exit_code == (0 if fits else 1)
    found = json.loads(result.stdout)
    assert (found["fits"], found["pinned"]) == (fits, True)
    assert found["models"]["target"]["weight_bytes"] == 2 * 70_553_706_496
    assert found["gated"] == [
        "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct",
    ]  # fmt: skip
    text = CliRunner().invoke(cli, ["pairs", "check", "llama-3.1-70b"]).stdout
    assert ("host    fits: needs" in text) == fits
    assert "accept the licence at https://huggingface.co/meta-llama/Llama-3.1-70B-Instruct" in text


def test_every_command_takes_a_pairs_file(tmp_path):
    folder = pairs.find_pair("tiny").target.sources[0].path
    declared = {"mine": {"target": {"sources": [{"kind": "path", "path": str(folder)}]}}}
    file = tmp_path / "pairs.yaml"
    file.write_text(json.dumps(declared))
    for command, told in (("list", "mine "), ("show mine", "pinned by its source"),
                          ("check mine", "fits"), ("pull mine", str(folder))):  # fmt: skip
        arguments = [*command.split(), "--pairs-file", str(file)]
        result = CliRunner().invoke(cli, ["pairs", *arguments])
        assert result.exit_code == 0, result.output
        assert told in result.stdout
    result = CliRunner().invoke(
        cli, ["run", "--pair", "mine", "--pairs-file", str(file), "--methods", "ar,sd"]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert "methods: sd need a draft, and pair mine has none" in result.stderr


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama-3.1-8b", "huggingface.co/meta-llama/Llama-3.1-8B-Instruct and set HF_TOKEN"),
        ("qwen3-8b", "Qwen/Qwen3-8B fetched elsewhere will do: --target PATH --draft PATH"),
    ],
)
def test_weights_that_cannot_be_had_say_how(name, way, tmp_path, monkeypatch):
    def refuse(self, request):
        raise ModelError("no route")

    monkeypatch.setattr(sources.HubFolder, "fetch", refuse)
    with pytest.raises(ModelError) as raised:
        pairs.resolve(pairs.find_pair(name), tmp_path)
    message = str(raised.value)
    assert message.startswith(f"pair {name}, target: no source serves it: ")
    assert way in message
    assert "\n" not in message


def test_a_shape_that_is_nowhere_to_be_had():
    model = pairs.Model(sources=(sources.HubFolder(repo="a/b"),))
    assert not model.pinned
    with pytest.raises(ModelError, match="declare its shape"):
        model.known_shape()


def test_a_folder_without_sizes(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    with pytest.raises(ModelError, match=r"no usable config\.json"):
        Shape.of_folder(tmp_path)


def test_unpinned_weights_are_trusted_as_they_were_at_their_first_use(tmp_path, monkeypatch):
    import shutil

    folder = shutil.copytree(pairs.find_pair("tiny").draft.sources[0].path, tmp_path / "model")
    monkeypatch.setattr(sources.HubFolder, "fetch", lambda *_: folder)
    pair = pairs.Pair(name="p", target=pairs.Model(sources=(sources.HubFolder(repo="a/b"),)))
    assert not pairs.resolve(pair, tmp_path / "cache").target.pinned
    target = pairs.find_pair("tiny").target.sources[0].path
    shutil.copy(target / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"at its first use it was [0-9a-f]{64}; .*first-use"):
        pairs.resolve(pair, tmp_path / "cache")
