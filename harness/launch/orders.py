"""The orders that a worker process takes (see `harness.worker`), and what its results mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config import RunConfig
from harness.errors import StoreError
from harness.launch.launcher import Preparation
from harness.plan import WorkItem
from harness.preparation import Prepared, from_json, to_json
from harness.verification import Verification, verifying_cores


def worker_threads(config: RunConfig) -> int:
    """Threads of a process that measures: one for each core of the target's first device."""
    return len(config.placement.rank_cores(0))


def verifier_threads(config: RunConfig) -> int:
    """Threads of a process that judges outputs."""
    return len(verifying_cores(config.placement))


def prepare_order(config: RunConfig) -> dict[str, Any]:
    """Check and prepare a run."""
    return {"task": "prepare", "config": config.model_dump(mode="json", exclude_unset=True)}


def preparation_of(result: Mapping[str, Any]) -> Preparation:
    """What `prepare_order` gave."""
    return Preparation(from_json(result["prepared"]), result["identity"])


def measure_order(prepared: Prepared, items: Sequence[WorkItem], directory: Path) -> dict[str, Any]:
    """Measure items and store them in a run directory."""
    return {
        "task": "measure",
        "prepared": to_json(prepared),
        "items": [item.id for item in items],
        "directory": str(directory.resolve()),
    }


def verify_order(prepared: Prepared, directory: Path) -> dict[str, Any]:
    """Judge every output of a stored run."""
    return {
        "task": "verify",
        "prepared": to_json(prepared),
        "directory": str(directory.resolve()),
    }


def verification_of(result: Mapping[str, Any], config: RunConfig, directory: Path) -> Verification:
    """What `verify_order` gave. Raises `StoreError` when it cannot be read back."""
    found = Verification.from_record({**result, "config": {"verify": config.verify}})
    if found is None:
        raise StoreError(f"{directory}: the certificate cannot be read back")
    return found
