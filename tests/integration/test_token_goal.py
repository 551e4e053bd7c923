"""`harness verify --tokens`: outputs that end early are made up for by further repeats.

The decoders emit tokens of a fixed number whatever the prompt, so that every count is known.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from test_run import Counting, Dying, _fixed_decoders, entry_points_of, harness

from harness import registry
from harness.config import RunConfig
from harness.decoder import FinishReason, Request, Round
from harness.progress import LineProgress
from harness.runner import run
from harness.store import read_manifest, read_run
from harness.token_goal import decode_tokens, fewest_tokens

SILENT = LineProgress(io.StringIO())
_ = _fixed_decoders  # a fixture, for every test here too


class Brief(Counting):
    """Ends every output after two tokens of six."""

    name: ClassVar[str] = "brief"

    def round(self, request: Request) -> Round:
        done = super().round(request)
        end = self.emitted[request.request_id] == 2
        return replace(done, finish=FinishReason.EOS) if end else done


class Baseline(Counting):
    """Emits no token that ends a text."""

    def tokens(self, positions: range) -> tuple[int, ...]:
        return tuple(10 + i for i in positions)


class Astray(Baseline):
    """Right at first, then one off."""

    name: ClassVar[str] = "astray"

    def tokens(self, positions: range) -> tuple[int, ...]:
        return tuple(10 + i if i < 3 else 11 + i for i in positions)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, _fixed_decoders: None) -> None:
    points = entry_points_of(Baseline, Brief, Astray, Dying)
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def config(**fields) -> RunConfig:
    given = {"pair": "tiny", "datasets": ("mini",), "max_new_tokens": 6, "isolate": False}
    few = {"methods": ("ar", "brief"), "verify": False, "control": False, "warmup_steps": 1}
    return RunConfig.model_validate({**given, **few, "temperatures": (1.0,), **fields})


def test_repeats_are_added_until_the_method_with_the_shortest_outputs_has_its_tokens(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    # full outputs need 7 repeats of 4 prompts for 150 tokens; brief's have 7 * 4 * 2 = 56 of them,
    # and 7 * 150 / 56 = 18.75 repeats make it 150 or more
    summary = decode_tokens(config(prompts=4), 150, out, SILENT)
    assert summary.exit_code == 0
    assert fewest_tokens(out) == 19 * 4 * 2
    tokens = read_run(out).requests.groupby("method")["output_tokens"].sum()
    assert tokens.to_dict() == {"ar": 19 * 4 * 6, "brief": 19 * 4 * 2}


def test_the_run_is_the_one_that_so_many_repeats_make_at_once(tmp_path: Path) -> None:
    decode_tokens(config(prompts=4), 16, tmp_path / "grown", SILENT)
    run(config(prompts=4, repeats=2), tmp_path / "whole", SILENT)
    grown, whole = (read_run(tmp_path / name) for name in ("grown", "whole"))
    assert grown.manifest["config"] == whole.manifest["config"]
    assert grown.manifest["plan"] == whole.manifest["plan"]
    key = ["item", "request_id"]
    rows = [data.requests.sort_values(key)[[*key, "output_ids"]] for data in (grown, whole)]
    assert rows[0].to_dict("list") == rows[1].to_dict("list")


def test_without_a_number_of_prompts_it_takes_as_many_as_full_outputs_need(tmp_path: Path) -> None:
    out = tmp_path / "run"
    decode_tokens(config(methods=("ar",)), 50, out, SILENT)
    manifest = read_manifest(out)
    assert manifest["config"]["prompts"] == 9  # of 6 tokens: 54
    assert manifest["config"]["repeats"] == 1
    assert fewest_tokens(out) == 54


def test_a_run_whose_method_fails_is_not_continued(tmp_path: Path) -> None:
    summary = decode_tokens(config(prompts=2, methods=("ar", "dying")), 13, tmp_path, SILENT)
    assert summary.status == "failed"
    assert read_manifest(tmp_path)["config"]["repeats"] == 2


def test_a_wrong_greedy_output_is_told_with_what_replays_it(tmp_path: Path) -> None:
    greedy = ("--methods", "astray", "--temperatures", "0", "--pair", "tiny", "--datasets", "mini")
    few = ("--prompts", "2", "--max-new-tokens", "6", "--out", tmp_path / "run", "--json")
    result = harness("verify", *greedy, *few)
    assert result.exit_code == 1
    verdicts = {v["method"]: v for v in json.loads(result.stdout)["verdicts"]}
    assert verdicts["ar"]["status"] == "pass"
    assert verdicts["astray"]["status"] == "fail"
    assert verdicts["astray"]["reproducer"]["position"] == 3
    assert "--methods astray" in verdicts["astray"]["reproducer"]["command"]
