"""The run file: validation, overrides, and one clear line for every mistake."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.config import DEFAULT_PAIR, RunConfig, load, merge, parse_settings
from harness.decoder import Placement
from harness.errors import UsageError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_run_file_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        pair: from-file
        methods: [ar, ssd]
        temperatures: [0, 1]
        placement: {target_cores: [0, 2]}
        options: {ssd: {lookahead: 4, fan_out: 3}}
        """,
    )
    config = load(
        path,
        {
            "temperatures": ("0.5",),
            "options": {"ssd": {"lookahead": 6}},
            "placement": {"draft_cores": ("3",)},
        },
    )
    assert config.pair == "from-file"
    assert config.methods == ("ar", "ssd")
    assert config.temperatures == (0.5,)
    assert config.options == {"ssd": {"lookahead": 6, "fan_out": 3}}
    assert config.placement == Placement(target_cores=(0, 2), draft_cores=(3,))


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("cuda:0-3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:5, cuda:1-2", ("cuda:5", "cuda:1", "cuda:2")),
        (["cuda:1"], ("cuda:1",)),
        ("cpu,cpu", ("cpu", "cpu")),
    ],
)
def test_devices_by_range_by_list_and_by_name(names, devices) -> None:
    placement = load(None, {"placement": {"target_devices": names}}).placement
    assert placement.target_devices == devices
    assert placement.draft_device == devices[0]  # none of its own was named
    stored = RunConfig(placement=placement).model_dump(mode="json")
    assert RunConfig.model_validate(stored).placement == placement


def test_the_command_line_moves_the_draft_of_a_run_file(tmp_path: Path) -> None:
    path = write(tmp_path, "placement: {target_devices: cuda:0-1, draft_device: cuda:2}")
    placement = load(path, {"placement": {"draft_device": "cuda:0"}}).placement
    assert (placement.target_devices, placement.draft_device) == (("cuda:0", "cuda:1"), "cuda:0")


@pytest.mark.parametrize(
    ("given", "devices", "cores"),
    [
        ({"draft_device": "cuda:4-5"}, ("cuda:4", "cuda:5"), [(1,), (2,)]),
        (
            {"target_devices": "cuda:0-3", "draft_device": ["cuda:4", "cuda:6"]},
            ("cuda:4", "cuda:6"),
            [(4,), (5,)],
        ),
        ({"draft_device": "cpu,cpu", "draft_cores": [1, 2, 3, 4]}, ("cpu",) * 2, [(1, 2), (3, 4)]),
        ({"draft_cores": [1, 2]}, ("cpu",), [(1, 2)]),  # one draft with two threads
    ],
)
def test_several_draft_devices_have_a_worker_each(given, devices, cores) -> None:
    placement = load(None, {"placement": given}).placement
    assert placement.draft_devices == devices
    assert [placement.worker_cores(number) for number in range(len(devices))] == cores
    one = placement.with_one_draft()
    assert (one.draft_devices, one.draft_cores) == (devices[:1], cores[0])
    stored = RunConfig(placement=placement).model_dump(mode="json")
    assert RunConfig.model_validate(stored).placement == placement


def test_an_empty_run_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), {}) == RunConfig(pair=DEFAULT_PAIR)


def test_truncation_of_the_distribution_is_off_by_default_and_recorded() -> None:
    stored = RunConfig().model_dump()
    assert stored["top_k"] == 0
    assert stored["top_p"] == 1.0


def test_models_given_by_path_replace_the_pair_of_the_file() -> None:
    file = {"pair": "a", "seed": 3}
    assert merge(file, {"target": "/t"}) == {"target": "/t", "seed": 3}
    assert merge({"target": "/t", "draft": "/d"}, {"pair": "a"}) == {"pair": "a"}


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperatures": [0, -1]}, "temperatures.1: must be >= 0"),
        ({"temperatures": [float("inf")]}, "temperatures.0: must be a finite number, got inf"),
        ({"temperatures": []}, "temperatures: needs at least one value"),
        ({"methods": ["sd", "ar", "sd"]}, "methods: sd is listed twice"),
        ({"batch_sizes": [0]}, "batch_sizes.0: must be >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be >= 1"),
        ({"top_p": 0}, "top_p: must be > 0"),
        ({"top_p": 1.5}, "top_p: must be <= 1"),
        ({"tempratures": [1]}, 'unknown option "tempratures": did you mean "temperatures"?'),
        (
            {"placement": {"target_core": [1]}},
            'unknown option "placement.target_core": did you mean "placement.target_cores"?',
        ),
        (
            {"placement": {"draft_cores": []}},
            "placement: target_cores and draft_cores need at least one core each",
        ),
        (
            {"placement": {"target_devices": "gpu0"}},
            "placement: target_devices: gpu0 is no device; write cpu, cuda:0 or cuda:0-3",
        ),
        (
            {"placement": {"target_devices": "cuda:0,"}},
            "placement: target_devices: nothing is no device; write cpu, cuda:0 or cuda:0-3",
        ),
        (
            {"placement": {"target_devices": []}},
            "placement: target_devices: needs at least one device",
        ),
        (
            {"placement": {"target_devices": "cuda:3-1"}},
            "placement: target_devices: cuda:3-1 counts down; write cuda:1-3",
        ),
        (
            {"placement": {"target_devices": "cuda:0-1,cuda:1"}},
            "placement: target_devices: cuda:1 is listed twice",
        ),
        (
            {"placement": {"target_devices": "cpu,cuda:0"}},
            "placement: target_devices: are either all GPUs or all cpu",
        ),
        (
            {"placement": {"draft_device": "cuda:4-5,cuda:4"}},
            "placement: draft_device: cuda:4 is listed twice",
        ),
        (
            {"placement": {"draft_device": "cuda:4,cpu"}},
            "placement: draft_device: are either all GPUs or all cpu",
        ),
        (
            {"placement": {"draft_device": "cpu,cpu", "draft_cores": [1]}},
            "placement: draft_cores: 1 cannot be shared out evenly among 2 draft_devices; give a "
            "multiple",
        ),
        (
            {"placement": {"draft_device": "cpu,cpu", "draft_cores": [1, 1]}},
            "placement: draft_cores: 1 is listed twice; a device has cores of its own",
        ),
        (
            {"placement": {"target_devices": "cuda:0", "convention": "pooled"}},
            "placement: convention: pooled is for one target device, a CPU; drop it",
        ),
        (
            {"placement": {"target_devices": "cpu,cpu", "target_cores": [0, 1, 2]}},
            "placement: target_cores: 3 cannot be shared out evenly among 2 target_devices; give a "
            "multiple",
        ),
        (
            {"placement": {"target_devices": "cuda:0-1"}, "engine": "hf"},
            "target_devices: several are the lean engine's; name one, or drop engine hf",
        ),
        ({"pair": "a", "target": "b"}, "pair: name a pair or give target and draft, not both"),
        ({"draft": "d"}, "draft: needs a target beside it"),
        (
            {"raw": True, "system": "Be brief."},
            "system: has no place in a raw prompt; drop it or drop raw",
        ),
        ({"seed": -1, "repeats": 0}, "repeats: must be >= 1; seed: must be >= 0"),
    ],
)
def test_a_wrong_value_is_one_line_naming_its_field(values: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as error:
        load(None, values)
    assert str(error.value) == line
    assert error.value.exit_code == 2


def test_a_wrong_field_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: -1")
    with pytest.raises(UsageError) as error:
        load(path, {})
    assert str(error.value) == f"{path}: seed: must be >= 0"


@pytest.mark.parametrize("text", ["- a\n- b", "pair: [", "!!python/object/apply:os.system [x]"])
def test_a_file_that_is_no_plain_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"--config .*run\.yaml: ") as error:
        load(write(tmp_path, text), {})
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "absent.yaml", {})


def test_settings_are_yaml_scalars() -> None:
    assert parse_settings(
        ["ssd.lookahead=6", "ssd.backup=fast", "sd.adaptive=false", "a.b=x=y"]
    ) == {
        "ssd": {"lookahead": 6, "backup": "fast"},
        "sd": {"adaptive": False},
        "a": {"b": "x=y"},
    }


def test_settings_of_variants() -> None:
    assert parse_settings(["ssd:c0.5.saguaro_c=0.5", "ssd.lookahead=3"]) == {
        "ssd:c0.5": {"saguaro_c": 0.5},
        "ssd": {"lookahead": 3},
    }


@pytest.mark.parametrize("setting", ["ssd", "ssd.lookahead", "lookahead=6", ".k=1", "ssd.=1"])
def test_a_setting_that_names_no_option_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="must look like METHOD"):
        parse_settings([setting])
