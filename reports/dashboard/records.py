"""What the dashboard keeps of one run or benchmark file: a few numbers for each series.

A record is derived from its source alone and stored beside the run's page, so that a source is read
once and not again until it, or this program, changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.statistics import Estimate


@dataclass(frozen=True)
class Metric:
    """A figure that is followed over runs."""

    label: str
    higher_is_better: bool
    digits: int = 1


METRICS = {
    "tokens_per_s": Metric("tokens/s", True),
    "over_ar": Metric("times as fast as AR", True, 2),
    "over_sd": Metric("times as fast as SD", True, 2),
    "tpot_ms": Metric("median TPOT, ms", False),
    "acceptance_length": Metric("tokens a round", True, 2),
    "hit_rate": Metric("cache hit rate", True, 2),
    "benchmark_ms": Metric("median, ms", False, 3),
}


@dataclass(frozen=True)
class Group:
    """What must be the same for two numbers to be comparable over time.

    Attributes:
        key: digest of the machine's identity and of the pair's weights.
        machine, pair: names for readers.
        identity: the fields behind the key.
    """

    key: str
    machine: str
    pair: str
    identity: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """One figure of one cell.

    Attributes:
        setting: dataset, temperature, batch size and prompts in words; one chart for each.
        line: the method, or the name of a benchmark.
        metric: a key of `METRICS`.
        estimate: with its 95% interval.
        noise: reach of the A/A control's interval from 1; None without one.
    """

    setting: str
    line: str
    metric: str
    estimate: Estimate
    noise: float | None = None


@dataclass(frozen=True)
class Record:
    """A stored run or benchmark file.

    Attributes:
        key: names its page; letters, digits and hyphens.
        source: path below the folder that was read.
        kind: `run` or `benchmark`.
        created: ISO 8601 with its offset.
        revision: git commit or None; `dirty` where the tree had other changes.
        lossless: cells (method at a temperature and batch size) by certificate: passed, failed,
            unverified.
        failures: work items that failed.
        observations: of complete cells that were neither degraded nor controls.
    """

    key: str
    source: str
    kind: str
    created: str
    status: str
    revision: str | None
    dirty: bool
    group: Group
    methods: tuple[str, ...]
    lossless: dict[str, int]
    failures: int
    observations: tuple[Observation, ...]


@dataclass(frozen=True)
class Unreadable:
    """A source that could not be read, and why."""

    source: str
    reason: str
