"""Joules for each token, from the energy counters read around each item (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.conditions import Conditions
from harness.metrics import CellData

UNKNOWN = "energy is not known: neither RAPL nor NVML could be read on this machine"
EMULATED = (
    "energy is not told: the emulated devices' is not known, and this machine's is not theirs"
)


@dataclass(frozen=True, slots=True)
class Energy:
    """What one cell used, idle power and prefill included.

    Attributes:
        joules_per_token: of all sources, over the tokens emitted.
        watts: the same energy over the duration of the items.
        sources: what was counted: packages, their memory, GPUs.
    """

    joules_per_token: float
    watts: float
    sources: tuple[str, ...]


def cell_energy(data: CellData, conditions: Sequence[Conditions]) -> Energy | None:
    """Of a cell; None unless every item of it was counted by the same sources.

    Args:
        data: its rows.
        conditions: of all items of the run.
    """
    items = set(data.requests["item"])
    own = [found for found in conditions if found.item in items]
    sources = {tuple(found.energy_j) for found in own}
    tokens = int(data.requests["output_tokens"].sum())
    if len(own) < len(items) or len(sources) != 1 or not tokens:
        return None
    (counted,) = sources
    if not counted:
        return None
    joules = sum(sum(found.energy_j.values()) for found in own)
    return Energy(joules / tokens, joules / sum(found.seconds for found in own), counted)
