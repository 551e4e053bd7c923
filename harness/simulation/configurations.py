"""Scenarios of one method as arrays, a row for each: a round is then a few array operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.simulation.profile import PassModel
from harness.simulation.scenario import Scenario


@dataclass(frozen=True)
class PassTable:
    """Seconds of passes by scenario and number of tokens, looked up instead of worked out."""

    seconds: np.ndarray  # [scenario, tokens]

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds, one for each scenario."""
        rows = np.arange(len(self.seconds))
        found: np.ndarray = self.seconds[rows, np.minimum(tokens, self.seconds.shape[1] - 1)]
        return found


class Configurations:
    """Scenarios of one method.

    Arrays have one row for each scenario; those about sequences have a column for each slot, as
    many as the largest batch has. `live` says in which slots there is a sequence: as many as the
    batch has, fewer where a trace's last requests end.
    """

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self.scenarios = tuple(scenarios)
        self.lookahead = self.column(lambda s: s.lookahead)
        self.batch_size = self.column(lambda s: s.batch_size)
        self.longest = int(self.lookahead.max())
        self.slots = int(self.batch_size.max())
        self.live = np.arange(self.slots) < self.batch_size[:, None]
        self.output_tokens = self.column(lambda s: s.output_tokens)
        self.transfer = self.column(lambda s: s.profile.transfer_s)
        self._tables: dict[str, PassTable] = {}

    def __len__(self) -> int:
        return len(self.scenarios)

    @property
    def sequences(self) -> np.ndarray:
        """How many sequences each scenario has now."""
        return np.asarray(self.live.sum(axis=1))

    def column(self, value: Callable[[Scenario], float]) -> np.ndarray:
        """One value for each scenario."""
        return np.array([value(scenario) for scenario in self.scenarios])

    def passes(self, name: str, most: Callable[[Scenario], int]) -> PassTable:
        """The table of `verify_idle`, `verify_loaded`, `draft_idle` or `draft_loaded`.

        Args:
            name: attribute of `Profile`.
            most: tokens of a scenario's largest pass.
        """
        if name not in self._tables:
            width = max(most(scenario) for scenario in self.scenarios) + 1
            rows = [_row(getattr(s.profile, name), s, width) for s in self.scenarios]
            self._tables[name] = PassTable(np.stack(rows))
        return self._tables[name]


def _row(model: PassModel, scenario: Scenario, width: int) -> np.ndarray:
    return model.seconds(np.arange(width), scenario.batch_size, scenario.context)
