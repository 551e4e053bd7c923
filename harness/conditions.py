"""Under which conditions each item was measured: who else ran, what the clocks and the heat did.

Read between items by the process that does not measure. Derived figures and the limits beyond
which a cell is named: `harness.noise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from harness.counters import CounterReader, Counters, CpuTimes
from harness.decoder import Placement
from harness.nvml import open_gpus

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class GpuConditions:
    """One GPU, read when the item had ended.

    Attributes:
        sm_mhz: clock of its multiprocessors.
        throttled: why it was slower than asked.
    """

    sm_mhz: int | None
    throttled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """A line of conditions.jsonl; None is what this machine does not tell.

    Attributes:
        item: id of the work item.
        seconds: from before its first prefill to after its last step.
        run_cores: core-seconds of the cores that the run may use.
        machine: core-seconds of all cores.
        own_s: CPU time of the run's own processes.
        quota_s: core-seconds that the quota of the run's container kept from it.
        throttles: how often the run's cores were slowed for heat.
        frequency_mhz: mean of these cores when the item had ended.
        gpus: of each GPU.
        energy_j: joules used by each part of the machine that tells, idle power included.
        node: of the cluster, that measured the item; None where there is no cluster.
    """

    item: str
    seconds: float
    run_cores: CpuTimes | None
    machine: CpuTimes | None
    own_s: float | None
    quota_s: float | None
    throttles: int | None
    frequency_mhz: float | None
    gpus: tuple[GpuConditions, ...] = ()
    energy_j: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None

    @classmethod
    def between(cls, item: str, before: Counters, after: Counters) -> Conditions:
        """From the readings around an item."""
        return cls(
            item=item,
            seconds=(after.time_ns - before.time_ns) / 1e9,
            run_cores=_during(before.run_cores, after.run_cores),
            machine=_during(before.machine, after.machine),
            own_s=_difference(before.own_s, after.own_s),
            quota_s=_difference(before.quota_s, after.quota_s),
            throttles=_difference(before.throttles, after.throttles),
            frequency_mhz=after.frequency_mhz,
            gpus=tuple(GpuConditions(gpu.sm_mhz, gpu.throttled) for gpu in after.gpus),
            energy_j=_energy_during(before, after),
        )

    @classmethod
    def from_json(cls, line: str) -> Conditions:
        """What a line says. Raises `ValueError` for one that was cut short."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(line)


class ConditionsWatch:
    """Reads the counters around each item."""

    def __init__(self, reader: CounterReader) -> None:
        self._reader = reader
        self._before: Counters | None = None

    def begin(self) -> None:
        """An item is about to be measured."""
        self._before = self._reader.read()

    def end(self, item: str) -> Conditions | None:
        """The item has been measured; None when nobody said that it began."""
        after, before = self._reader.read(), self._before
        self._before = None
        return None if before is None else Conditions.between(item, before, after)


def watch(placement: Placement, fingerprint: Mapping[str, Any]) -> ConditionsWatch:
    """For a run on these cores and on the GPUs of its fingerprint."""
    cores = (*placement.target_cores, *placement.draft_cores)
    return ConditionsWatch(CounterReader(cores, open_gpus(_uuids(fingerprint))))


def _uuids(fingerprint: Mapping[str, Any]) -> Iterable[str]:
    return [gpu["uuid"] for gpu in fingerprint.get("gpus", ()) if gpu.get("uuid")]


def _during(before: CpuTimes | None, after: CpuTimes | None) -> CpuTimes | None:
    if before is None or after is None:
        return None
    return CpuTimes(
        busy_s=round(after.busy_s - before.busy_s, 6),
        steal_s=round(after.steal_s - before.steal_s, 6),
        cores=after.cores,
    )


def _energy_during(before: Counters, after: Counters) -> dict[str, float]:
    """Joules by source; a counter that has started from 0 again has done so once."""
    found = {}
    earlier = {counter.source: counter.joules for counter in before.energy}
    for counter in after.energy:
        if counter.source in earlier:
            used = counter.joules - earlier[counter.source]
            found[counter.source] = round(used + (counter.range_j or 0.0) * (used < 0), 6)
    return found


def _difference(before: _Number | None, after: _Number | None) -> _Number | None:
    return None if before is None or after is None else round(after - before, 6)
