"""Records as series: by machine and pair, then by setting, method and metric; and their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness.statistics import Estimate
from reports.dashboard.records import METRICS, Group, Metric, Record, Unreadable
from reports.dashboard.steps import TOLERANCE, Step, find_steps


class Point(NamedTuple):
    """One run's figure."""

    record: Record
    estimate: Estimate
    value: float
    noise: float | None


@dataclass(frozen=True)
class Change:
    """A step of a series between two neighbouring runs.

    Attributes:
        series: whose.
        step: levels and place.
        before, after: the last run at the old level and the first at the new one.
        gate: relative change that had to be exceeded.
    """

    series: Series
    step: Step
    before: Record
    after: Record
    gate: float

    @property
    def regression(self) -> bool:
        return (self.step.change < 0) == self.series.metric.higher_is_better

    @property
    def open(self) -> bool:
        """Whether the series' last level is still worse by more than the gate."""
        change = self.step.last / self.step.before - 1
        loss = -change if self.series.metric.higher_is_better else change
        return self.regression and loss > self.gate

    @property
    def commits(self) -> str:
        """`OLD..NEW`; what is not known is a question mark."""
        old, new = (short_revision(record) for record in (self.before, self.after))
        return old if old == new else f"{old}..{new}"


@dataclass(frozen=True)
class Series:
    """One metric of one method in one setting, over the runs of a group, oldest first."""

    group: Group
    setting: str
    line: str
    name: str
    points: tuple[Point, ...]

    @property
    def metric(self) -> Metric:
        return METRICS[self.name]

    @property
    def gate(self) -> float:
        """The tolerance, or the A/A controls' median noise where that is wider."""
        noises = [point.noise for point in self.points if point.noise is not None]
        return max(TOLERANCE, median(noises) if noises else 0.0)

    def changes(self) -> Iterator[Change]:
        """The steps, oldest first."""
        for step in find_steps([point.value for point in self.points], self.gate):
            before, after = (self.points[step.index - at].record for at in (1, 0))
            yield Change(self, step, before, after, self.gate)


@dataclass(frozen=True)
class Setting:
    """The series that share a dataset, temperature, batch size and workload."""

    name: str
    series: tuple[Series, ...]

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(each.line for each in self.series))

    @property
    def runs(self) -> list[Record]:
        """Every run with a point, oldest first."""
        found = {p.record.key: p.record for each in self.series for p in each.points}
        return sorted(found.values(), key=_age)


@dataclass(frozen=True)
class GroupView:
    """The runs of one machine and pair."""

    group: Group
    records: tuple[Record, ...]
    settings: tuple[Setting, ...]
    changes: tuple[Change, ...]

    @property
    def open_regressions(self) -> list[Change]:
        return [change for change in self.changes if change.open]


@dataclass(frozen=True)
class Site:
    """What was built."""

    index: Path
    records: tuple[Record, ...]
    groups: tuple[GroupView, ...]
    unreadable: tuple[Unreadable, ...]

    @property
    def open_regressions(self) -> list[Change]:
        return [change for view in self.groups for change in view.open_regressions]


def group_records(records: Iterable[Record]) -> list[GroupView]:
    """Groups with the latest run first; unlike machines or pairs are never in one."""
    by_key: dict[str, list[Record]] = {}
    for record in sorted(records, key=_age):
        by_key.setdefault(record.group.key, []).append(record)
    groups = [_view(own) for own in by_key.values()]
    return sorted(groups, key=lambda view: _age(view.records[-1]), reverse=True)


def short_revision(record: Record) -> str:
    """Ten digits of the commit; `+` where the tree had changes that are in no commit."""
    return (record.revision or "?")[:10] + "+" * record.dirty


def _age(record: Record) -> tuple[str, str]:
    return record.created, record.key


def _view(records: Sequence[Record]) -> GroupView:
    points: dict[tuple[str, str, str], list[Point]] = {}
    for record in records:
        for seen in record.observations:
            if (value := seen.estimate.value) is not None:
                where = seen.setting, seen.line, seen.metric
                points.setdefault(where, []).append(Point(record, seen.estimate, value, seen.noise))
    group = records[-1].group
    series = [Series(group, *where, tuple(own)) for where, own in sorted(points.items())]
    changes = [change for each in series for change in each.changes()]
    return GroupView(
        group,
        tuple(records),
        tuple(
            Setting(name, tuple(each for each in series if each.setting == name))
            for name in dict.fromkeys(each.setting for each in series)
        ),
        tuple(sorted(changes, key=lambda change: _age(change.after), reverse=True)),
    )
