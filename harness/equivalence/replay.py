"""Where a failure shows most, and the command that brings it about again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.config import RunConfig
from harness.plan import Cell

if TYPE_CHECKING:
    import pandas as pd

    from harness.greedy import Divergence

_SKIPPED = {  # fields that change no token, or that the command names itself
    *("methods", "temperatures", "batch_sizes", "options", "placement", "control"),
    *("warmup_steps", "warmup_prompt_tokens", "cache_dir", "verify", "max_rounds"),
}


@dataclass(frozen=True, slots=True)
class Reproducer:
    """The smallest case that shows a failure.

    Attributes:
        request_id: the prompt, `DATASET/PROMPT_INDEX/r{R}`.
        prompt_tokens: its length.
        seed: of the run.
        position: index in the output of the first wrong token, or of the one that says most.
        round: the round that emitted it.
        command: the command line that decodes and judges it again.
    """

    request_id: str
    prompt_tokens: int
    seed: int
    position: int
    round: int
    command: str


def most_telling(tokens: pd.DataFrame, evidence: pd.Series[float]) -> pd.Series[Any]:
    """The token that says most, in the round that says most, of the output that says most.

    Args:
        tokens: the token table.
        evidence: what each of some of its rows adds to the failed statistic, by their index.

    Returns:
        The token's row. Outputs are compared by evidence per root of their length, so that a long
        one does not win by its length; at equal evidence the shorter prompt wins.
    """
    own = tokens.loc[evidence.index].assign(evidence=evidence)
    by_output = own.groupby(["prompt_tokens", "output"])["evidence"]
    telling: pd.Series[float] = by_output.sum() / np.sqrt(by_output.size())
    own = own[own["output"] == telling.index[int(telling.argmax())][1]]
    number = own.groupby("round")["evidence"].sum().idxmax()
    own = own[own["round"] == number]
    best: pd.Series[Any] = own.loc[own["evidence"].idxmax()]
    return best


def smallest_divergence(
    divergences: Iterable[Divergence], prompt_tokens: Mapping[str, int]
) -> Divergence:
    """The divergence with the fewest tokens before it."""
    return min(divergences, key=lambda found: prompt_tokens[found.request_id] + found.position)


def round_of(position: int, rounds: pd.DataFrame) -> int:
    """The round that emitted the token at a position, from the output's rows of rounds.parquet."""
    last = rounds["emitted"].cumsum().to_numpy()
    index = min(int(np.searchsorted(last, position, side="right")), len(rounds) - 1)
    return int(rounds["round"].iloc[index])


def as_decoded(
    manifest: Mapping[str, Any], method: str, temperature: float, batch_size: int
) -> dict[str, Any]:
    """A run's configuration with what tuning gave one group among its options, and no tuning."""
    config = manifest["config"]
    options = dict(config.get("options", {}).get(method, {}))
    for dataset in manifest.get("datasets", {}):
        cell = Cell(method, dataset, temperature, batch_size).id
        decoder = manifest.get("decoders", {}).get(cell, {})
        options |= {key: decoder["options"][key] for key in decoder.get("tuned_options", ())}
    return {**config, "options": {method: options}, "tuned": False}


def replay_command(
    config: Mapping[str, Any], method: str, temperature: float, batch_size: int
) -> str:
    """`harness verify` with the options that decode one group of a run again, token for token.

    Args:
        config: the run's configuration, from its manifest.
        method: whose group.
        temperature: of the group.
        batch_size: of the group.
    """
    words = ["harness", "verify", "--methods", method, "--temperatures", f"{temperature:g}"]
    words += ["--batch-sizes", str(batch_size)]
    for name, field in RunConfig.model_fields.items():
        value = config.get(name)
        if name in _SKIPPED or value is None or value == field.get_default():
            continue
        words += _option(name, value)
    for key, value in config.get("options", {}).get(method, {}).items():
        words += ["--set", f"{method}.{key}={_text(value)}"]
    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, _text(value)]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)
