"""What the kernel and the GPUs have counted up to a moment, for a run that wants to know its noise.

Reading takes well under a millisecond and starts nothing. What this machine does not tell is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.nvml import Gpu, GpuState

# Fields of a `cpu` line of /proc/stat (proc(5)); guest time is counted in user and nice already.
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq
_STEAL = 7
# RAPL zones that add up without counting anything twice: a package holds its cores and its
# integrated GPU but not its memory; `psys` would hold the packages again.
_PACKAGE, _MEMORY = "package-", "dram"
# Fields of /proc/PID/stat behind the command: utime, stime and those of children waited for.
_CPU_TIMES = slice(11, 15)
_THROTTLES = ("core_throttle_count", "package_throttle_count")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since boot, added up over cores.

    Attributes:
        busy_s: something ran, interrupts too.
        steal_s: a hypervisor gave the core to somebody else while something wanted to run.
        cores: how many.
    """

    busy_s: float
    steal_s: float
    cores: int


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """Energy that a part of the machine has used.

    Attributes:
        source: which part.
        joules: since some moment in the past.
        range_j: at which it starts from 0 again; None where it does not.
    """

    source: str
    joules: float
    range_j: float | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading.

    Attributes:
        time_ns: monotonic.
        run_cores: of the cores that the run may use.
        machine: of all cores.
        own_s: CPU time of this process and of all below it, those that have ended too.
        quota_s: for which our container was held back by its CPU quota, added up over cores.
        throttles: how often the run's cores were slowed for heat.
        frequency_mhz: mean of the run's cores at this moment.
        gpus: of each GPU.
        energy: of each CPU package, its memory and each GPU, where they tell.
    """

    time_ns: int
    run_cores: CpuTimes | None
    machine: CpuTimes | None
    own_s: float | None
    quota_s: float | None
    throttles: int | None
    frequency_mhz: float | None
    gpus: tuple[GpuState, ...]
    energy: tuple[EnergyCounter, ...]


class CounterReader:
    """Reads the counters that concern one run."""

    def __init__(
        self,
        cores: Iterable[int],
        gpus: Sequence[Gpu] = (),
        *,
        pid: int | None = None,
        root: Path = Path("/"),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Reads nothing yet.

        Args:
            cores: that the run may use.
            gpus: the run's.
            pid: the top of the run's own processes; this one by default.
            root: where `proc` and `sys` are.
            clock: nanoseconds, monotonic.
        """
        self._cores = sorted(set(cores))
        self._gpus = tuple(gpus)
        self._pid = os.getpid() if pid is None else pid
        self._proc, self._cpus = root / "proc", root / "sys/devices/system/cpu"
        self._rapl = _rapl_zones(root / "sys/class/powercap")
        self._cgroup = root / "sys/fs/cgroup/cpu.stat"  # of version 2
        self._clock = clock
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def read(self) -> Counters:
        """The counters now."""
        ticks = dict(self._core_ticks())
        own = [ticks[core] for core in self._cores if core in ticks]
        gpus = tuple(gpu.state() for gpu in self._gpus)
        return Counters(
            time_ns=self._clock(),
            run_cores=self._times(own),
            machine=self._times(list(ticks.values())),
            own_s=self._own_s(),
            quota_s=self._quota_s(),
            throttles=self._throttles(),
            frequency_mhz=self._frequency_mhz(),
            gpus=gpus,
            energy=(*self._rapl_energy(), *_gpu_energy(gpus)),
        )

    def _rapl_energy(self) -> Iterator[EnergyCounter]:
        """Nothing where only root may read it, which is the default of the kernel."""
        for source, zone in self._rapl.items():
            used, most = (_text(zone / name) for name in ("energy_uj", "max_energy_range_uj"))
            if used is not None and most is not None:
                yield EnergyCounter(source, int(used) / 1e6, int(most) / 1e6)

    def _core_ticks(self) -> Iterator[tuple[int, list[int]]]:
        for line in (_text(self._proc / "stat") or "").splitlines():
            name, _, rest = line.partition(" ")
            if name.startswith("cpu") and name != "cpu":
                yield int(name.removeprefix("cpu")), [int(field) for field in rest.split()]

    def _times(self, cores: Sequence[Sequence[int]]) -> CpuTimes | None:
        if not cores:
            return None
        busy = sum(fields[index] for fields in cores for index in _BUSY)
        steal = sum(fields[_STEAL] for fields in cores)
        return CpuTimes(busy * self._tick_s, steal * self._tick_s, len(cores))

    def _own_s(self) -> float | None:
        """A child that is waited for hands its time to its parent, so nothing is lost or doubled.

        None on kernels that do not list children.
        """
        total, left = 0, [self._pid]
        while left:
            process = self._proc / str(left.pop())
            stat = _text(process / "stat")
            if stat is None:  # it has just ended
                continue
            total += sum(map(int, stat.rpartition(")")[2].split()[_CPU_TIMES]))
            lists = [_text(thread / "children") for thread in process.glob("task/*")]
            if lists and all(children is None for children in lists):
                return None
            left += [int(child) for children in lists for child in (children or "").split()]
        return total * self._tick_s

    def _quota_s(self) -> float | None:
        lines = (_text(self._cgroup) or "").splitlines()
        found = dict(line.split(maxsplit=1) for line in lines)
        return int(found["throttled_usec"]) / 1e6 if "throttled_usec" in found else None

    def _throttles(self) -> int | None:
        files = [
            self._cpus / f"cpu{core}/thermal_throttle/{name}"
            for core in self._cores
            for name in _THROTTLES
        ]
        counts = [int(text) for text in map(_text, files) if text is not None]
        return sum(counts) if counts else None

    def _frequency_mhz(self) -> float | None:
        files = [self._cpus / f"cpu{core}/cpufreq/scaling_cur_freq" for core in self._cores]
        khz = [int(text) for text in map(_text, files) if text is not None]
        return sum(khz) / len(khz) / 1000 if khz else None


def _rapl_zones(powercap: Path) -> dict[str, Path]:
    """`package-N` and `package-N dram` -> their folders."""
    zones = {}
    for package in sorted(powercap.glob("intel-rapl:*")):  # of AMD too
        name = _text(package / "name") or ""
        if name.startswith(_PACKAGE):
            zones[name] = package
            below = [z for z in package.glob(f"{package.name}:*") if _text(z / "name") == _MEMORY]
            zones |= {f"{name} {_MEMORY}": zone for zone in below}
    return zones


def _gpu_energy(gpus: Sequence[GpuState]) -> Iterator[EnergyCounter]:
    for number, gpu in enumerate(gpus):
        if gpu.energy_j is not None:
            yield EnergyCounter(f"gpu {number}", gpu.energy_j)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
