"""Whether the machine was the run's own while it was measured; else which cells it disturbed.

Derived from the conditions of the items (`harness.conditions`). Limits: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.conditions import Conditions
from harness.counters import CpuTimes

STEAL = 0.01  # share of the run's cores; of a container's quota too
FOREIGN = 0.03  # share of the run's cores
ELSEWHERE = 0.10  # share of all cores: other cores share memory and power with the run's
SLOW = 0.95  # of the run's median clock
LEAST_S = 0.1  # core-seconds below which the kernel's 10 ms ticks say little
_NAMED = 8  # cells in a sentence


@dataclass(frozen=True, slots=True)
class Noise:
    """What disturbed one cell, over all its items; None where this machine does not tell.

    Attributes:
        steal: share of the run's cores that a hypervisor took.
        foreign: share of the run's cores that other programs and interrupts had.
        elsewhere: share of all cores of the machine that they had.
        held_back: share of the run's cores that the container's quota kept from it.
        throttles: times that the run's cores were slowed for heat.
        clock: lowest clock of an item over the run's median clock; cores or GPUs.
        throttled: why GPUs were slowed.
    """

    steal: float | None
    foreign: float | None
    elsewhere: float | None
    held_back: float | None
    throttles: int
    clock: float | None
    throttled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One kind of disturbance.

    Attributes:
        told: what happened.
        worst: how much of it in the cell that had most.
        cells: ids of those that it affected, the worst first.
    """

    told: str
    worst: str
    cells: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """With the worst cells by name."""
        more = f" and {len(self.cells) - _NAMED} more" if len(self.cells) > _NAMED else ""
        return f"{self.told}, up to {self.worst}: {', '.join(self.cells[:_NAMED])}{more}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of disturbance: how bad it is in a cell (0 when within its limit) and its words."""

    told: str
    excess: Callable[[Noise], float]
    amount: Callable[[Noise], str]


_KINDS = (
    _Kind(
        "a hypervisor took CPU time from the run's cores (steal)",
        lambda noise: _above(noise.steal, STEAL),
        lambda noise: f"{noise.steal:.1%}",
    ),
    _Kind(
        "other programs ran on the run's cores",
        lambda noise: _above(noise.foreign, FOREIGN),
        lambda noise: f"{noise.foreign:.1%}",
    ),
    _Kind(
        "other programs loaded the machine",
        lambda noise: 0.0 if _above(noise.foreign, FOREIGN) else _above(noise.elsewhere, ELSEWHERE),
        lambda noise: f"{noise.elsewhere:.1%} of all cores",
    ),
    _Kind(
        "the container's CPU quota held the run back",
        lambda noise: _above(noise.held_back, STEAL),
        lambda noise: f"{noise.held_back:.1%}",
    ),
    _Kind(
        "cores were slowed for heat",
        lambda noise: float(noise.throttles),
        lambda noise: f"{noise.throttles} times",
    ),
    _Kind(
        "clocks were lower than in the rest of the run",
        lambda noise: 0.0 if noise.clock is None or noise.clock >= SLOW else 1 - noise.clock,
        lambda noise: f"{noise.clock:.0%} of the median clock",
    ),
    _Kind(
        "GPUs were slowed",
        lambda noise: float(len(noise.throttled)),
        lambda noise: ", ".join(noise.throttled),
    ),
)


def cell_noise(conditions: Sequence[Conditions]) -> dict[str, Noise]:
    """By cell id, in the order of their first items."""
    cells: dict[str, list[Conditions]] = {}
    for item in conditions:
        cells.setdefault(item.item.rsplit("/", 2)[0], []).append(item)
    usual = _median_clocks(conditions)
    return {cell: _noise(items, usual) for cell, items in cells.items()}


def quiet_sentence(cells: Mapping[str, Noise]) -> str:
    """The largest of each share over all cells, for people."""
    shares = {
        "steal": [noise.steal for noise in cells.values()],
        "other programs": [noise.foreign for noise in cells.values()],
    }
    told = (f"{name} {_largest(values)}" for name, values in shares.items())
    return f"of the run's cores at most {' and '.join(told)}"


def disturbances(cells: Mapping[str, Noise]) -> tuple[Disturbance, ...]:
    """Every kind of disturbance that is beyond its limit in some cell."""
    found = []
    for kind in _KINDS:
        excess = {cell: kind.excess(noise) for cell, noise in cells.items()}
        affected = sorted(filter(excess.get, cells), key=lambda cell: -excess[cell])
        if affected:
            found.append(Disturbance(kind.told, kind.amount(cells[affected[0]]), tuple(affected)))
    return tuple(found)


def _noise(items: Sequence[Conditions], usual: Mapping[str, float]) -> Noise:
    steal = _total(None if (own := item.run_cores) is None else own.steal_s for item in items)
    run_cores = _total(_core_seconds(item.run_cores, item) for item in items)
    machine = _total(_core_seconds(item.machine, item) for item in items)
    ratios = [clock / usual[unit] for item in items for unit, clock in _clocks(item)]
    reasons = (reason for item in items for gpu in item.gpus for reason in gpu.throttled)
    return Noise(
        steal=_share(steal, run_cores),
        foreign=_share(_total(_foreign_s(item.run_cores, item) for item in items), run_cores),
        elsewhere=_share(_total(_foreign_s(item.machine, item) for item in items), machine),
        held_back=_share(_total(item.quota_s for item in items), run_cores),
        throttles=sum(item.throttles or 0 for item in items),
        clock=min(ratios, default=None),
        throttled=tuple(dict.fromkeys(reasons)),
    )


def _clocks(item: Conditions) -> Iterable[tuple[str, float]]:
    """Unit -> clock in MHz."""
    if item.frequency_mhz:
        yield "cpu", item.frequency_mhz
    for number, gpu in enumerate(item.gpus):
        if gpu.sm_mhz:
            yield f"gpu {number}", gpu.sm_mhz


def _median_clocks(conditions: Sequence[Conditions]) -> dict[str, float]:
    clocks: dict[str, list[float]] = {}
    for item in conditions:
        for unit, clock in _clocks(item):
            clocks.setdefault(unit, []).append(clock)
    return {unit: median(found) for unit, found in clocks.items()}


def _above(share: float | None, limit: float) -> float:
    return share if share is not None and share > limit else 0.0


def _share(part_s: float | None, whole_s: float | None) -> float | None:
    """Of core-seconds; what is too short for the kernel's ticks counts as nothing."""
    if part_s is None or not whole_s:
        return None
    return part_s / whole_s if part_s >= LEAST_S else 0.0


def _core_seconds(cores: CpuTimes | None, item: Conditions) -> float | None:
    return None if cores is None else cores.cores * item.seconds


def _foreign_s(cores: CpuTimes | None, item: Conditions) -> float | None:
    return None if cores is None or item.own_s is None else cores.busy_s - item.own_s


def _largest(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{max(known):.1%}" if known else "not told"


def _minus(busy_s: float | None, own_s: float | None) -> float | None:
    return None if busy_s is None or own_s is None else busy_s - own_s


def _total(values: Iterable[float | None]) -> float | None:
    """None where one of them is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None
