"""What of a stored run is not real; it stands in capitals wherever one of its figures shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def emulated_devices(manifest: Mapping[str, Any]) -> str | None:
    """The profile whose time passes were made to take; None where they took their own."""
    emulated = _fingerprint(manifest).get("emulated")
    return None if emulated is None else str(emulated).partition(":")[2]


def synthetic_parts(manifest: Mapping[str, Any]) -> str | None:
    """What a coin and random numbers stood in for (`harness.synthetic.describe`); else None."""
    synthetic = _fingerprint(manifest).get("synthetic")
    return None if synthetic is None else str(synthetic)


def label(manifest: Mapping[str, Any]) -> str | None:
    """`EMULATED ...` and `SYNTHETIC ...`; None for a run of which everything is real."""
    found = (("EMULATED", emulated_devices(manifest)), ("SYNTHETIC", synthetic_parts(manifest)))
    return ", ".join(f"{word} {told}" for word, told in found if told is not None) or None


def _fingerprint(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = manifest.get("fingerprint") or {}
    return found
