"""Parameters that a search chose, with their evidence: stored, read back, and when they hold.

A choice holds for the pair, the machine, the placement, the batch size and the kind of decoding
(greedy or sampled) that it was made with, and never for prompts that it was made on. Knows nothing
of searching.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import StoreError
from harness.fingerprint import differences, machine_differences
from harness.plan import Cell
from harness.statistics import Estimate

FORMAT = 1


class Setting(NamedTuple):
    """What a method is tuned for, beside pair and machine."""

    sampled: bool
    batch_size: int

    @classmethod
    def of(cls, cell: Cell) -> Setting:
        """The setting of a cell; all temperatures above 0 are one."""
        return cls(cell.temperature > 0, cell.batch_size)

    def __str__(self) -> str:
        return f"{'sampled' if self.sampled else 'greedy'}, batch size {self.batch_size}"


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Candidate(_Stored):
    """One candidate in one rung of the search.

    Attributes:
        rung: from 0; each rung keeps the fastest third of the one before.
        options: the values tried; those of the defaults in the candidate that is the defaults.
        rounds: measured rounds of its sequences.
        tokens_per_s: with its 95% interval over prompts; no value when it failed.
        kept: whether it went on, or in the last rung won.
        failure: why it was not measured to the end.
    """

    rung: int
    options: dict[str, Any]
    rounds: int
    tokens_per_s: Estimate
    kept: bool
    failure: str | None = None


class Choice(_Stored):
    """The outcome of one search.

    Attributes:
        format: of this file.
        created: when the search ended (UTC, ISO 8601).
        command: argv.
        git: revision and state of the program.
        method: what was tuned.
        temperature, batch_size: what for.
        options: the values chosen.
        fixed: options that were given, so not searched.
        budget: rounds that every method was given.
        rounds: rounds spent.
        candidates: the evidence, rung by rung.
        runs: the run directories that it was read from.
        prompts: dataset -> `Prompt.sha256` of each prompt measured on.
        pair: as in a run's manifest.
        fingerprint: as in a run's manifest, placement included.
    """

    format: int = FORMAT
    created: str
    command: tuple[str, ...]
    git: dict[str, Any]
    method: str
    temperature: float
    batch_size: int
    options: dict[str, Any]
    fixed: dict[str, Any]
    budget: int
    rounds: int
    candidates: tuple[Candidate, ...]
    runs: tuple[str, ...]
    prompts: dict[str, tuple[str, ...]]
    pair: dict[str, Any]
    fingerprint: dict[str, Any]

    @property
    def setting(self) -> Setting:
        """What it was made for."""
        return Setting(self.temperature > 0, self.batch_size)

    @property
    def words(self) -> str:
        """The values chosen."""
        return in_words(self.options)

    @property
    def spent(self) -> str:
        """How much was measured."""
        prompts = sum(map(len, self.prompts.values()))
        return f"{self.rounds} of {self.budget} rounds on {prompts} tuning prompts"

    def lines(self) -> Iterator[tuple[str, str, str, str, str]]:
        """For each candidate of each rung: rung, values, rounds, tokens/s, what became of it."""
        last = self.candidates[-1].rung
        for each in self.candidates:
            fate = each.failure or ("chosen" if each.rung == last else "goes on") * each.kept
            speed = _interval(each.tokens_per_s)
            yield str(each.rung), in_words(each.options), str(each.rounds), speed, fate


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a run offers.

    Attributes:
        pair, fingerprint: as in its manifest.
        prompts: `Prompt.sha256` of every prompt that it decodes.
    """

    pair: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    prompts: frozenset[str]


def in_words(options: Mapping[str, Any]) -> str:
    """Such as `lookahead=4 budget=auto`."""
    return " ".join(f"{key}={value}" for key, value in options.items())


def write_choice(choice: Choice, folder: Path) -> Path:
    """Stores a choice beside the earlier ones.

    Returns:
        The file.

    Raises:
        StoreError: the folder cannot be written.
    """
    when = choice.created.replace(":", "-").partition("+")[0]
    kind = "sampled" if choice.setting.sampled else "greedy"
    pair = str(choice.pair["name"]).replace("/", "_")
    path = folder / f"{pair}-{choice.method}-{kind}-b{choice.batch_size}-{when}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(choice.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    return path


def read_choices(folder: Path) -> tuple[Choice, ...]:
    """Every stored choice, the newest first; none where there is no folder.

    Raises:
        StoreError: a file that is no choice, or of another format.
    """
    found = [_read(path) for path in sorted(folder.glob("*.json"))]
    return tuple(sorted(found, key=lambda choice: choice.created, reverse=True))


def mismatch(choice: Choice, conditions: Conditions) -> str | None:
    """Why the choice does not hold under these conditions; None when it does."""
    if unlike := differences(_identity(choice.pair), _identity(conditions.pair)):
        return f"tuned for another pair ({unlike[0]})"
    if unlike := machine_differences(choice.fingerprint, conditions.fingerprint):
        return f"tuned on another machine or placement ({unlike[0]})"
    if any(not conditions.prompts.isdisjoint(hashes) for hashes in choice.prompts.values()):
        return "tuned on prompts that this run measures"
    return None


def find(
    choices: Iterable[Choice], method: str, setting: Setting, conditions: Conditions
) -> Choice | str:
    """The newest choice that holds, or else why there is none."""
    reasons = []
    for choice in choices:
        if choice.method != method or choice.setting != setting:
            continue
        reason = mismatch(choice, conditions)
        if reason is None:
            return choice
        reasons.append(reason)
    return reasons[0] if reasons else "never tuned"


def _interval(speed: Estimate) -> str:
    if speed.value is None:
        return "-"
    if speed.low is None or speed.high is None:
        return f"{speed.value:.1f}"
    return f"{speed.value:.1f} [{speed.low:.1f}, {speed.high:.1f}]"


def _identity(pair: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a pair's speed and tokens, whatever it is called and wherever it came from."""
    keys = ("sha256", "dtype", "operators")
    models = {
        role: {key: model.get(key) for key in keys} if (model := pair[role]) else None
        for role in ("target", "draft")
    }
    settings = ("engine", "draft_vocab", "draft_quantization")
    return {**models, **{key: pair.get(key) for key in settings}}


def _read(path: Path) -> Choice:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("format") != FORMAT:
            raise StoreError(
                f"{path}: is of format {values.get('format')}, not {FORMAT}; tune again"
            )
        return Choice.model_validate(values)
    except (OSError, ValueError, AttributeError) as error:  # ValidationError is a ValueError
        reason = "not a tuning choice" if isinstance(error, ValidationError) else error
        raise StoreError(f"{path}: cannot be read ({reason}); delete it and tune again") from error
