"""A run's rounds, replayed under the settings of another: what the real decoder then did.

Greedy and deterministic, so that nothing follows the clock. The text and the draft's list at each
of its tokens are the same for both; the lookaheads and the fan-outs are not.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from click.testing import CliRunner

from harness.cli import cli
from harness.simulation.traces import TracedOutcomes, trace_of
from harness.store import read_run
from impl.ssd.fan_out import uniform

SETTINGS = {"long": (5, 12), "short": (2, 9), "none": (3, 0)}  # lookahead, budget


def decoded(folder: Path) -> pd.DataFrame:
    """Rounds of the same prompts under each of the settings."""
    options = [
        f"ssd:{name}.{key}={value}"
        for name, (lookahead, budget) in SETTINGS.items()
        for key, value in {
            "lookahead": lookahead, "budget": budget, "build": "all", "fan_out": "uniform",
            "fallback": "neural", "return_short": "false",
        }.items()
    ]  # fmt: skip
    arguments = [
        *("run", "--no-isolate", "--no-verify", "--no-control", "--deterministic"),
        *("--pair", "tiny", "--datasets", "mini", "--prompts", "2", "--max-new-tokens", "40"),
        *("--methods", ",".join(f"ssd:{name}" for name in SETTINGS), "--out", str(folder)),
        *(part for option in options for part in ("--set", option)),
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return read_run(folder).rounds


def replayed(rounds: pd.DataFrame, lookahead: int, budget: int, count: int) -> list[tuple]:
    """(accepted, whether the cache had the outcome) of so many rounds from the first on."""
    outcomes = TracedOutcomes(trace_of(rounds), 1, 1, None, seed=0)
    outcomes.admit(np.array([[True]]))
    guesses, drafted, found = np.array(uniform(budget, lookahead)), np.array([[lookahead]]), []
    for _ in range(count):
        accepted = np.minimum(outcomes.accepted(0), lookahead)
        missed = outcomes.beyond(0, accepted, drafted, guesses[accepted])
        found.append((int(accepted[0, 0]), not missed[0, 0]))
        outcomes.advance(accepted + 1)
    return found


def recorded(rounds: pd.DataFrame, lookahead: int) -> list[tuple]:
    """The same, as it was, while drafts are whole: near its end a request drafts less."""
    rounds = rounds.sort_values("round")
    whole = int((rounds["drafted"] == lookahead).cumprod().sum())
    hits = (rounds["cache"] == "hit").shift(-1)
    pairs = zip(rounds["accepted"], hits, strict=True)
    return [(int(accepted), bool(hit)) for accepted, hit in pairs][: whole - 1]


def test_a_trace_tells_what_any_other_lookahead_and_fan_out_did(tmp_path: Path) -> None:
    rounds = decoded(tmp_path / "run")
    compared = 0
    for _, request in rounds.groupby("request_id"):
        by_name = {
            name: request[request["item"].str.startswith(f"ssd:{name}/")] for name in SETTINGS
        }
        for told in ("long", "short"):  # without guesses a run does not rank the last token
            for name, (lookahead, budget) in SETTINGS.items():
                expected = recorded(by_name[name], lookahead)
                found = replayed(by_name[told], lookahead, budget, len(expected))
                assert found == expected, f"{name} as told by {told}"
                compared += len(expected)
    assert compared > 100
