"""Emulated devices: the real decoders on a small pair whose passes take a profile's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness.errors import UsageError
from harness.simulation.profile import PassModel, Profile, load_profile

if TYPE_CHECKING:
    from impl.engine.emulated_model import Latency

PREFIX = "emulated:"
CONTEXT = 512  # tokens of a sequence in an emulated pass, at any time
_SIZES = np.unique(np.geomspace(1, 8192, 80).astype(int))  # new tokens of a pass


class Latencies(NamedTuple):
    """What passes of both models take."""

    target: Latency
    draft: Latency


def emulated_profile(devices: str) -> Profile:
    """The profile behind `emulated:PROFILE`. Raises `UsageError`."""
    if not devices.startswith(PREFIX):
        raise UsageError(f"devices {devices}: must be {PREFIX}PROFILE (see harness simulate)")
    return load_profile(devices.removeprefix(PREFIX))


def latencies(devices: str, batch_size: int) -> Latencies:
    """Of a run's passes on the device alone: the host's part is our own code's, as long as it is.

    Emulated devices share nothing, so the idle times hold.
    """
    profile = emulated_profile(devices)
    models = (profile.verify_idle, profile.draft_idle)
    return Latencies(*(_latency(model, batch_size, profile.host_s) for model in models))


def device_count(devices: str, drafts: int) -> int:
    """How many emulated devices a method owns that has so many draft processes."""
    profile = emulated_profile(devices)
    return profile.target_devices + drafts * profile.draft_devices


def _latency(model: PassModel, batch_size: int, host_s: float) -> Latency:
    from impl.engine.emulated_model import Latency

    seconds = model.seconds(_SIZES, batch_size, CONTEXT) - host_s
    return Latency(tuple(_SIZES.tolist()), tuple(seconds.tolist()))
