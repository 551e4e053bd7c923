"""A file that `pytest --benchmark-json` wrote as a record: one series for each benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import StoreError
from harness.statistics import Estimate
from reports.dashboard.records import Group, Observation, Record
from reports.dashboard.runs import group_key

_NOT_IDENTITY = ("hz_actual", "hz_actual_friendly")  # the clock at the moment
_NOTCH = 1.57  # McGill, Tukey and Larsen (1978): median +- 1.57 IQR / sqrt(n) is about 95%


def is_benchmark(contents: Any) -> bool:
    """Whether a JSON document is one of pytest-benchmark's."""
    return isinstance(contents, Mapping) and {"benchmarks", "machine_info"} <= contents.keys()


def benchmark_record(contents: Mapping[str, Any], key: str, source: str) -> Record:
    """The record of a document of pytest-benchmark.

    Raises:
        StoreError: a field is absent or of another kind.
    """
    try:
        commit = contents.get("commit_info") or {}
        return Record(
            key=key,
            source=source,
            kind="benchmark",
            created=str(contents["datetime"]),
            status="finished",
            revision=commit.get("id"),
            dirty=bool(commit.get("dirty")),
            group=_group(contents["machine_info"]),
            methods=(),
            lossless={},
            failures=0,
            observations=tuple(_observations(contents["benchmarks"])),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreError(f"{source}: is no pytest-benchmark file: {error!r}") from error


def _group(machine: Mapping[str, Any]) -> Group:
    cpu = {k: v for k, v in (machine.get("cpu") or {}).items() if k not in _NOT_IDENTITY}
    fields = {**machine, "cpu": cpu}
    name = cpu.get("brand_raw") or machine.get("processor") or machine.get("machine")
    cores = f", {cpu['count']} cores" if cpu.get("count") else ""
    return Group(group_key(fields), f"{name or 'unknown machine'}{cores}", "benchmarks", fields)


def _observations(benchmarks: Any) -> Iterator[Observation]:
    for benchmark in benchmarks:
        stats, name = benchmark["stats"], str(benchmark["fullname"])
        rounds, middle = int(stats["rounds"]), 1e3 * float(stats["median"])
        reach = 1e3 * _NOTCH * float(stats["iqr"]) / max(rounds, 1) ** 0.5
        low, high = (middle - reach, middle + reach) if rounds > 1 else (None, None)
        yield Observation(name, "benchmark", "benchmark_ms", Estimate(middle, low, high, rounds))
