"""Which nodes of a cluster measure one run: those that are one machine as far as it can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.fingerprint import lacks_accelerator, machine_differences

_NAMED = 4  # differences that a reason lists


def refused_nodes(
    fingerprints: Mapping[str, Mapping[str, Any]],
    accelerator: str | None,
    machine: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Name -> why a node may not measure.

    Args:
        fingerprints: node name -> what it is.
        accelerator: what its GPUs must be called.
        machine: that the run was made on so far; None takes the kind of machine that the most
            nodes are, the first of them where two kinds are as many.
    """
    refused: dict[str, str] = {}
    fit: dict[str, Mapping[str, Any]] = {}
    for name, found in fingerprints.items():
        reason = None if accelerator is None else lacks_accelerator(found, accelerator)
        if reason is None:
            fit[name] = found
        else:
            refused[name] = reason
    if machine is None and fit:
        machine = max(fit.values(), key=lambda own: sum(not _differ(own, b) for b in fit.values()))
    for name, found in fit.items():
        if differing := _differ(machine or {}, found):
            refused[name] = told(differing)
    return refused


def told(differences: list[str]) -> str:
    """A reason that names the fields: first as the run's machine has them, then as the node has."""
    more = f"; {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return f"it differs in {'; '.join(differences[:_NAMED])}{more}"


def _differ(machine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return machine_differences(machine, other)
