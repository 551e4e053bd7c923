"""Several runs of one plan as the rows that `harness show`, its Markdown and the report have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import NamedTuple

from harness.messages import markdown
from harness.repeated_runs import SCHEMA, RepeatedRuns, RepeatedSpeedup
from harness.statistics import RunsEstimate
from harness.summary_markdown import table_lines

COLUMNS = ("method", "each run", "runs together", "run to run")


class Group(NamedTuple):
    """The speedups on the same datasets, temperature and batch size, under one title."""

    title: str
    speedups: tuple[RepeatedSpeedup, ...]


def groups(found: RepeatedRuns) -> Iterator[Group]:
    """In the order of `found.speedups`."""
    unreal = f", {found.label}" if found.label else ""
    for _, own in groupby(found.speedups, key=_setting):
        speedups = tuple(own)
        yield Group(f"{where(speedups[0])}, {found.placement} placement{unreal}", speedups)


def _setting(own: RepeatedSpeedup) -> tuple[tuple[str, ...], float, int]:
    return own.datasets, own.temperature, own.batch_size


def where(own: RepeatedSpeedup) -> str:
    """Datasets, temperature and batch size in words."""
    count = len(own.datasets)
    datasets = own.datasets[0] if count == 1 else f"{count} datasets together"
    return f"{datasets}, temperature {own.temperature:g}, batch size {own.batch_size}"


def row(own: RepeatedSpeedup) -> tuple[str, str, str, str]:
    """A speedup under `COLUMNS`."""
    return (
        f"{own.method} over {own.baseline}",
        " ".join(f"{value:.2f}" for value in own.speedup.runs),
        together(own.speedup),
        "-" if own.speedup.between_runs is None else f"{own.speedup.between_runs:.1%}",
    )


def together(estimate: RunsEstimate) -> str:
    """Such as `1.09 [1.02, 1.16]`; says so where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f} [no interval]"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def legend(found: RepeatedRuns) -> str:
    """What the columns are."""
    return (
        f"{len(found.runs)} runs, in this order: {', '.join(found.runs)}. Together: the geometric "
        "mean and a 95% interval over runs and prompts (docs/metrics.md). Run to run: the standard "
        "deviation of a run's speedup. Each run's own checks and warnings: harness show RUN."
    )


def as_markdown(found: RepeatedRuns) -> str:
    """Warnings first, then a table for each dataset, temperature and batch size."""
    lines = [f"> warning: {markdown(warning)}  " for warning in found.warnings]
    for group in groups(found):
        lines += ["", *table_lines(group.title, COLUMNS, map(row, group.speedups))]
    return "\n".join([*lines, "", markdown(legend(found))])


def as_json(found: RepeatedRuns) -> str:
    """For scripts; the names in it are fixed."""
    from harness.store import to_json

    return to_json({"schema": SCHEMA, **asdict(found)})
