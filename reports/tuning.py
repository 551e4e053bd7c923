"""The tables of how a run's methods were tuned, from the choices in its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COLUMNS = ("Rung", "Candidate", "Rounds", "Tokens/s", "")


@dataclass(frozen=True)
class TuningTable:
    """The evidence of one choice.

    Attributes:
        title: method and setting.
        chosen: values, and how much was measured.
        rows: a candidate in a rung each, entries as in COLUMNS.
    """

    title: str
    chosen: str
    rows: tuple[tuple[str, ...], ...]


def tuning_tables(manifest: Mapping[str, Any]) -> Iterator[TuningTable]:
    """A table for each choice that the run used."""
    from harness.tuning.choices import Choice

    for values in (manifest.get("tuning") or {}).get("choices", ()):
        choice = Choice.model_validate(values)
        title = f"{choice.method}, {choice.setting}"
        chosen = f"{choice.words}, of {choice.spent}, on {choice.created[:10]}"
        yield TuningTable(title, chosen, tuple(choice.lines()))
