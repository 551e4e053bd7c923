"""NVIDIA GPUs as their driver's management library sees them, where `pynvml` can be imported.

`pynvml` comes with the package `nvidia-ml-py`. What a GPU or its driver does not tell is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Bits of nvml.h's nvmlClocksEventReasons that slow a GPU below what was asked of it.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class GpuState:
    """One reading of one GPU.

    Attributes:
        sm_mhz: clock of its multiprocessors.
        throttled: why it is slower than asked.
        energy_j: since its driver was loaded.
    """

    sm_mhz: int | None
    throttled: tuple[str, ...]
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What of a GPU somebody can set, and how it is wired.

    Attributes:
        max_sm_mhz: highest clock of its multiprocessors.
        sm_mhz_set: clock that applications get unless heat or power forbid it.
        power_limit_w: most power that it may draw.
        nvlinks: active links.
        nvlink_peers: numbers of the run's GPUs that it reaches over NVLink.
    """

    max_sm_mhz: int | None = None
    sm_mhz_set: int | None = None
    power_limit_w: float | None = None
    nvlinks: int | None = None
    nvlink_peers: list[int] | None = None


class Gpu(Protocol):
    """Something that can be read between items."""

    def state(self) -> GpuState:
        """A reading."""


class NvmlGpu:
    """A GPU behind an NVML handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def state(self) -> GpuState:
        """See `Gpu`."""
        nvml, handle = self._nvml, self._handle
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        millijoules = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return GpuState(
            sm_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            throttled=tuple(told for bit, told in _THROTTLE_REASONS.items() if reasons & bit),
            energy_j=None if millijoules is None else millijoules / 1000,
        )

    def settings(self, gpus: Sequence[NvmlGpu]) -> GpuSettings:
        """Read once a run; `gpus` are all of the run's."""
        nvml, handle = self._nvml, self._handle
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerManagementLimit, handle)
        links = [
            self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        ]
        kind, linked = nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK
        peers = [
            number
            for number, other in enumerate(gpus)
            if other is not self
            and self._ask(nvml.nvmlDeviceGetP2PStatus, handle, other._handle, kind) == linked
        ]
        return GpuSettings(
            max_sm_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            sm_mhz_set=self._ask(nvml.nvmlDeviceGetApplicationsClock, handle, nvml.NVML_CLOCK_SM),
            power_limit_w=None if milliwatts is None else milliwatts / 1000,
            nvlinks=sum(bool(link) for link in links),
            nvlink_peers=peers,
        )

    def _ask(self, function: Callable[..., int], *arguments: Any) -> int | None:
        try:
            return function(*arguments)
        except self._nvml.NVMLError:  # not supported by this GPU, or not allowed
            return None


def open_gpus(uuids: Iterable[str]) -> tuple[NvmlGpu, ...]:
    """The GPUs with these UUIDs that NVML can see; none where there is no NVML.

    Args:
        uuids: as `GPU-...`.
    """
    wanted = tuple(uuids)
    if not wanted:
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        return tuple(NvmlGpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in wanted)
    except pynvml.NVMLError:
        return ()


def gpu_settings(uuids: Sequence[str]) -> list[GpuSettings]:
    """Of the GPUs with these UUIDs, in their order; nothing is known of them without NVML."""
    gpus = open_gpus(uuids)
    return [gpu.settings(gpus) for gpu in gpus] or [GpuSettings() for _ in uuids]
