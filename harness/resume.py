"""Whether a stored run may be continued: only by the same config, on the same inputs and machine.

Rows of one run directory are compared with each other, so nothing that changes an output or a
duration may differ between the item that was measured first and the one measured last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.config import UNMEASURED, RunConfig
from harness.errors import StoreError
from harness.fingerprint import differences, machine_differences
from harness.messages import describe

_SOURCE = "source"  # of weights and prompts: they are compared by their sums
_RECORDS = ("config", "pair", "datasets", "plan", "stop_token_ids", "git")
_NAMED = 4  # differences that the message lists


def stored_config(manifest: Mapping[str, Any], places: Mapping[str, Any]) -> RunConfig:
    """The config of a run, read, kept and done in other places where those are given.

    Raises:
        StoreError: this program has no such options any more.
    """
    given = {name: place for name, place in places.items() if place is not None}
    try:
        stored = {"split": "all", **manifest["config"]}  # what runs took before there were splits
        return RunConfig.model_validate({**stored, **given})
    except ValidationError as error:
        reason = describe(error, RunConfig.model_fields, prefix="config")
        raise StoreError(f"the run was made by another version: {reason}") from error


def refuse_changes(directory: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `StoreError` unless two manifests are of one run on one machine.

    Args:
        directory: of the stored run, for the message.
        then: its manifest.
        now: what the manifest of a new run would be.
    """
    found = changes(then, now)
    if not found:
        return
    more = f"; {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise StoreError(
        f"{directory}: cannot be continued, it differs from what would be measured now: "
        f"{'; '.join(found[:_NAMED])}{more}; measure it anew under another --out"
    )


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields in which two runs differ, a line each; empty when one may continue the other."""
    machines = [manifest.get("fingerprint") or {} for manifest in (then, now)]
    return [
        *differences(_comparable(then), _comparable(now)),
        *(f"fingerprint.{line}" for line in machine_differences(*machines)),
    ]


def _comparable(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The records that must agree, without the options that may change."""
    records = {name: manifest.get(name) for name in _RECORDS}
    config = {k: v for k, v in (manifest.get("config") or {}).items() if k not in UNMEASURED}
    plan = dict(enumerate(manifest.get("plan") or ()))
    return {**_without_sources(records), "config": config, "plan": plan}


def _without_sources(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_sources(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != _SOURCE
    }
