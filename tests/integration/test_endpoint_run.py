"""`harness run --methods endpoint`: a server's streams as a run, what goes wrong as one line."""

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mock_server import Script, serve

from harness.cli import cli
from harness.store import read_run

OPTIONS = ("--methods", "endpoint", "--pair", "tiny", "--datasets", "mini", "--prompts", "2")


def chunk(text: str, finish: str | None = None, **choice: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}]}


def harness_run(url: str, out: Path, **options: object) -> Result:
    command = ["run", "--no-isolate", "--no-verify", "--max-new-tokens", "4", "--out", str(out)]
    for key, value in {"url": url, **options}.items():
        command += ["--set", f"endpoint.{key}={value}"]
    return CliRunner().invoke(cli, [*command, *OPTIONS])


def failures(result: Result) -> list[str]:
    """What is told of failed cells at the end."""
    assert "Traceback" not in result.output
    return [line for line in result.output.splitlines() if line.startswith("failed: endpoint/")]


def test_tokens_of_a_run_are_those_that_the_server_counted(tmp_path: Path) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    script = Script([chunk("a b"), chunk("c"), chunk("", "stop"), usage])
    with serve(script) as server:
        result = harness_run(server.url, tmp_path / "run")
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "run")
    assert run.requests["output_tokens"].tolist() == [3, 3]
    (decoder,) = run.manifest["decoders"].values()
    assert decoder["diagnostics"]["tokens_counted_by"] == "usage"


FAILURES = {
    "4xx": (Script(status=429, body='{"error": "slow down"}'), "429 Too Many Requests: slow down"),
    "5xx": (Script(status=503, body="<p>Loading\nmodel</p>"), "Unavailable: Loading model"),
    "cut": (Script([chunk("a", token_ids=[7])], done=False), "cut the stream before its end"),
    "silent": (Script([lambda: threading.Event().wait(3)]), "for too long (ReadTimeout)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_server_that_fails_ends_its_cell_with_one_line(name: str, tmp_path: Path) -> None:
    script, reason = FAILURES[name]
    with serve(script) as server:
        result = harness_run(server.url, tmp_path / "run", read_timeout=0.3)
    assert result.exit_code == 1
    (told,) = failures(result)
    where = f"endpoint/mini/t0/b1/r0/k0: EndpointError: {server.url}: request warm-up/0: "
    assert told.startswith(f"failed: {where}")
    assert reason in told


def test_a_server_that_is_not_there_is_one_line_too(tmp_path: Path) -> None:
    result = harness_run("http://127.0.0.1:9/v1", tmp_path / "run")
    assert result.exit_code == 1
    (told,) = failures(result)
    assert "http://127.0.0.1:9/v1: cannot be reached" in told
