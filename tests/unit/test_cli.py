"""The command line's own behaviour: quick help, one-line errors, exit codes, near matches."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness import registry
from harness.cli import cli
from harness.commands import run as run_command
from harness.errors import ModelError, StoreError

HEAVY = (
    "torch",
    "transformers",
    "pandas",
    "pyarrow",
    "numpy",
    "pydantic",
    "rich",
    "yaml",
    "jinja2",
)


def harness(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["pairs", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom harness.cli import cli\n"
        f"try: cli.main({arguments!r})\n"
        "except SystemExit as end: code = end.code\n"
        f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)), 'code:', code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: [] code: 0"


def test_every_command_has_help() -> None:
    names = ["run", "show", "report", "methods", "pairs", "datasets", "env", "verify", "compare"]
    names += ["dashboard", "paper", "profile", "simulate", "tune"]
    assert sorted(cli.commands) == sorted(names)
    assert all(command.help for command in cli.commands.values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rnu"], "error: No such command 'rnu'. Did you mean 'run'?"),
        (["env", "--jsn"], "error: No such option '--jsn'. Did you mean '--json'?"),
        (
            ["run", "--prompts", "x"],
            "error: Invalid value for '--prompts': 'x' is not a valid integer.",
        ),
        (["run", "--methods", "ar,,sd"], "error: Invalid value for '--methods': ar,,sd"),
        (["run", "--set", "sd"], "error: --set sd: must look like METHOD.KEY=VALUE"),
        (
            ["pairs", "show", "qwen2.5-code"],
            'error: unknown pair "qwen2.5-code": did you mean "qwen2.5-coder"? (see harness pairs)',
        ),
        (
            ["datasets", "show", "humanevl"],
            'error: unknown dataset "humanevl": did you mean "humaneval"? (see harness datasets)',
        ),
    ],
)
def test_a_usage_error_is_one_line_and_exits_2(arguments: list[str], line: str) -> None:
    result = harness(*arguments)
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"{line}\n", "")


def test_an_error_is_one_line_and_debug_keeps_the_traceback(tmp_path: Path) -> None:
    result = harness("show", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path}: is no run directory")
    assert result.stderr.count("\n") == 1
    assert isinstance(harness("--debug", "show", str(tmp_path)).exception, StoreError)


def test_no_command_shows_the_help() -> None:
    result = harness()
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> dict[str, EntryPoint]:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "available", interrupted)
    result = harness("methods")
    assert result.exit_code == 130
    assert result.stderr.strip() == "error: interrupted"


def test_a_broken_method_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        (
            EntryPoint("ar", "baselines.ar:AutoregressiveDecoder", registry.GROUP),
            EntryPoint("theirs", "their_package:Decoder", registry.GROUP),
            EntryPoint("sd", "baselines.sd:SpeculativeDecoder", registry.GROUP),
        )
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    result = harness("methods")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["ar", "sd", "theirs"]
    assert (
        "theirs  broken: method 'theirs' (their_package:Decoder) cannot be loaded" in result.stdout
    )
    assert "    sd.lookahead = " in result.stdout


def test_env_is_one_json_object_that_names_the_machine() -> None:
    found = json.loads(harness("env", "--json").stdout)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["placement"] == {
        "target_cores": [0],
        "draft_cores": [1],
        "shared": False,
        "convention": "equal-target",
        "target_devices": ["cpu"],
        "draft_device": "cpu",
        "channel": "shared",
    }


def test_the_environment_names_folders_and_options_win_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def fake_run(config, out, progress):  # type: ignore[no-untyped-def]
        seen.append((str(config.data_dir), str(config.cache_dir), config.raw, config.control))
        raise ModelError("far enough")

    monkeypatch.setattr("harness.runner.run", fake_run)
    monkeypatch.setenv("HARNESS_DATA_DIR", "/data")
    monkeypatch.setenv("HARNESS_CACHE_DIR", "/cache")
    harness("run")
    harness("run", "--data-dir", "/other", "--raw", "--no-control")
    assert seen == [("/data", "/cache", False, True), ("/other", "/cache", True, False)]


def test_comma_separated_values_may_have_spaces() -> None:
    assert run_command.comma_list("ssd, sd,ar") == ("ssd", "sd", "ar")


def test_the_shipped_run_file_is_valid_and_names_what_exists() -> None:
    from harness.config import load
    from harness.dataset_registry import load_registry
    from harness.pairs import find_pair

    config = load(Path(__file__).parents[2] / "configs" / "reproduce.yaml", {})
    assert find_pair(config.pair or "").draft is not None
    assert set(config.methods) <= set(registry.available())
    assert set(config.datasets) <= set(load_registry().datasets)
    assert config.control


def test_the_ray_launcher_without_ray_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = harness("run", "--launcher", "ray", "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert result.stderr == (
        "error: launcher: ray needs Ray, which is not installed: pip install saguaro-harness[ray]\n"
    )


def test_a_cluster_always_isolates() -> None:
    result = harness("run", "--launcher", "ray", "--no-isolate")
    assert (result.exit_code, "drop no-isolate" in result.stderr) == (2, True)
