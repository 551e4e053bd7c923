"""Rooflines worked by hand, profile files, and the command."""

import json

import numpy as np
import pytest
import yaml

from harness.cli import cli
from harness.errors import UsageError
from harness.memory import Shape
from harness.simulation.paper import PAIRS, paper
from harness.simulation.profile import PROFILES, devices, load_profile, shipped
from harness.simulation.roofline import Device, Efficiency, Roofline

# q = k = v = 4 wide: attention 4 * 16, MLP 3 * 4 * 8, two norms of 4: 168 a layer; tied head 40.
SHAPE = Shape(
    layers=2, hidden=4, intermediate=8, heads=2, kv_heads=2, head_dim=2, vocab=10, tied=True
)
DEVICE = Device(
    source="made up",
    checked="never",
    bandwidth_gb_s=1e-9 * 100,  # 100 bytes/s
    peak_tflops=1e-12 * 1000,  # 1000 operations/s
    link_gb_s=1e-9 * 10,
    memory_gb=1,
    layer_us=1e6,
    all_reduce_us=0.5e6,
    pass_us=3e6,
)
FULL = Efficiency(1.0, 1.0)


def seconds(tokens, devices=1, batch_size=1, context=0.0, efficiency=FULL, shape=SHAPE):
    roofline = Roofline(shape, "bfloat16", DEVICE, devices, efficiency)
    return float(roofline.seconds(np.array([tokens]), batch_size, context)[0])


def test_one_token_is_bound_by_the_weights():
    parameters = 2 * 168 + 40 + 4
    assert SHAPE.parameters == parameters
    assert seconds(1) == pytest.approx(parameters * 2 / 100 + 2 * 1 + 3)


def test_many_tokens_are_bound_by_arithmetic():
    assert seconds(100) == pytest.approx(100 * 2 * 380 / 1000 + 5)


def test_keys_and_values_of_every_sequence_are_read():
    # 2 (K, V) * 2 layers * 4 wide * 2 bytes = 32 bytes a token
    assert seconds(1, batch_size=3, context=50) - seconds(1) == pytest.approx(3 * 50 * 32 / 100)


def test_attention_is_in_the_arithmetic():
    # QK and PV: 4 * layers * (heads * head_dim) * context operations a token
    more = seconds(1000, context=50) - seconds(1000)
    assert more == pytest.approx(1000 * 4 * 2 * 4 * 50 / 1000)


def test_tensor_parallel_divides_the_pass_and_adds_all_reduces():
    exchanged = 2 * 2 * (2 * 1 / 2 * 1 * 4 * 2) / 10  # two a layer; rows of 4 at 2 bytes
    assert seconds(1, devices=2) == pytest.approx(380 * 2 / 100 / 2 + exchanged + 2 * (1 + 1) + 3)


def test_an_efficiency_divides_the_datasheet():
    slow = seconds(1, efficiency=Efficiency(0.5, 1.0))
    assert slow - seconds(1) == pytest.approx(380 * 2 / 100)


def test_an_embedding_that_is_no_head_is_not_read():
    untied = SHAPE.model_copy(update={"tied": False})
    assert untied.parameters == SHAPE.parameters + 40
    assert seconds(1, shape=untied) == pytest.approx(seconds(1))


def test_a_70b_pass_is_the_datasheet_by_hand():
    # Weights less an embedding, two bytes, a quarter each, at 80% of 3.35 TB/s.
    read = (70_553_706_496 - 128_256 * 8192) * 2 / 4 / (0.8 * 3.35e12)
    found = load_profile("h100x4+1-llama-3.1-70b").verify_idle.seconds(np.array([1]), 1, 0)
    overhead = 80 * (35 + 2 * 15) * 1e-6 + 300e-6
    assert found[0] == pytest.approx(read + overhead, rel=0.001)


def test_every_shipped_profile_loads_and_names_a_source():
    assert {"h100", "h200", "a100", "b200", "desktop-cpu"} <= set(devices())
    assert all(device.source for device in devices().values())
    for name in shipped():
        passes = load_profile(name).draft_idle.seconds(np.array([1, 2, 64]), 1, 512)
        assert (np.diff(passes) >= 0).all()
        assert passes[0] > 0


MEASURED = {
    "kind": "measured",
    "pair": "tiny",
    "machine": "by hand",
    "target_devices": 1,
    "draft_devices": 1,
    "transfer_us": 200,
    "context": 64,
    **{
        name: {"tokens": [1, 5], "seconds": [first, 2 * first]}
        for name, first in (
            ("verify_idle", 1.0), ("verify_loaded", 1.5), ("draft_idle", 0.1), ("draft_loaded", 0.2)
        )
    },
}  # fmt: skip


def write(tmp_path, changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MEASURED | changes))
    return path


def test_a_measured_profile_is_linear_between_its_sizes(tmp_path):
    found = load_profile(str(write(tmp_path, {})))
    tokens = np.array([[1, 3], [5, 9]])
    np.testing.assert_allclose(found.verify_loaded.seconds(tokens, 1, 64), [[1.5, 2.25], [3, 4.5]])
    assert found.transfer_s == pytest.approx(200e-6)
    assert found.name == "mine"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "guessed"}, "mine.yaml"),
        ({"transfer_us": -1}, "transfer_us"),
        ({"draft_idel": 1}, "draft_idel"),
        ({"verify_idle": {"tokens": [5, 1], "seconds": [1.0, 2.0]}}, "tokens must ascend"),
        ({"verify_idle": {"tokens": [1, 5], "seconds": [1.0]}}, "tokens must ascend"),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path, changes, named):
    with pytest.raises(UsageError, match=named):
        load_profile(str(write(tmp_path, changes)))


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(UsageError, match='did you mean "h100x4\\+1-qwen3-32b"'):
        load_profile("h100x4+1-qwen3-32")


def test_an_unknown_device_or_pair_without_a_draft_is_named(tmp_path):
    fields = yaml.safe_load((PROFILES / "h100x4+1-qwen3-32b.yaml").read_text())
    for change, named in (({"device": "h10"}, "h100"), ({"pair": "smollm2-135m"}, "no draft")):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(fields | change))
        with pytest.raises(UsageError, match=named):
            load_profile(str(path))


def test_the_papers_speeds_are_within_fifteen_percent():
    compared = paper()
    assert [(c.pair, c.method, c.published) for c in compared] == [
        ("llama-3.1-70b", "ar", 54.7),
        ("llama-3.1-70b", "sd", 161.8),
        ("llama-3.1-70b", "ssd", 255.8),
        ("qwen3-32b", "ar", 88.8),
        ("qwen3-32b", "sd", 136.8),
        ("qwen3-32b", "ssd", 203.8),
    ]
    assert all(abs(c.difference) < 0.15 for c in compared)
    assert all(abs(c.difference) > 1e-6 for c in compared)  # none is copied


def command(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments, prog_name="harness")
    return ended.value.code, capsys.readouterr()


def test_the_preset_as_json(capsys):
    code, out = command(["simulate", "--preset", "paper", "--json"], capsys)
    found = json.loads(out.out)
    assert code == 0
    assert {(r["pair"], r["method"]) for r in found["rows"]} == {
        (pair, method) for pair in PAIRS for method in ("ar", "sd", "ssd")
    }
    assert all(row["label"] == "simulated" for row in found["rows"])
    assert found["assumptions"]["acceptance"] == {"llama-3.1-70b": 0.85, "qwen3-32b": 0.65}


def test_a_profile_is_simulated_and_says_so(tmp_path, capsys):
    path = str(write(tmp_path, {}))
    options = ["--acceptance", "1", "--lookahead", "4", "--rounds", "50", "--methods", "ar,sd"]
    code, out = command(["simulate", "--profile", path, *options], capsys)
    assert code == 0
    assert "SIMULATED" in out.out
    _, out = command(["simulate", "--profile", path, *options, "--json"], capsys)
    ar, sd = json.loads(out.out)["rows"]
    assert ar["tokens_per_s"] == pytest.approx(1.0)
    assert sd["tokens_per_s"] == pytest.approx(5 / (2.0 + 4 * 0.1))
    assert sd["label"] == "simulated"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--profile"),
        (["--profile", "h100x4+1-qwen3-32b", "--acceptance", "much"], "--acceptance much"),
        (["--profile", "h100x4+1-qwen3-32b", "--methods", "sdd"], "--methods"),
        (["--profile", "h100x4+1-qwen3-32b", "--trace", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(arguments, named, capsys):
    code, out = command(["simulate", *arguments], capsys)
    assert code in (1, 2)
    assert named in out.err
    assert len(out.err.splitlines()) == 1
