"""Writes the site: an index, a page for each machine and pair and for each run, feed and badge."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.statistics import Estimate
from harness.store import to_json
from reports.colours import MethodStyle, method_styles
from reports.dashboard.charts import SHOWN, draw_series
from reports.dashboard.feed import badge, feed
from reports.dashboard.records import METRICS, Record, Unreadable
from reports.dashboard.series import (
    Change,
    GroupView,
    Series,
    Setting,
    Site,
    group_records,
    short_revision,
)
from reports.dashboard.sources import Source, find_sources, read_record
from reports.svg import style
from reports.tables import Value
from reports.templating import render_template, write_text

if TYPE_CHECKING:
    from markupsafe import Markup

REPORTS = 10  # full reports that one build writes, at most: each takes seconds


class _Chart(NamedTuple):
    title: str
    svg: Markup


class _Figure(NamedTuple):
    line: str
    metric: str
    value: Value


class _LatestRow(NamedTuple):
    variable: str
    line: str
    runs: int
    values: tuple[Value | None, ...]


class _SettingView(NamedTuple):
    anchor: str
    name: str
    runs: int
    metrics: tuple[str, ...]
    rows: tuple[_LatestRow, ...]
    charts: tuple[_Chart, ...]


def build_site(folder: Path, out: Path, reports: int = REPORTS) -> Site:
    """Builds the site of every run directory and pytest-benchmark file below a folder.

    Args:
        folder: searched to any depth, or a run directory itself.
        out: where the site goes; what is there from an earlier build is used again.
        reports: full reports to write at most, newest runs without one first; the other runs have
            a page of tables.

    Raises:
        StoreError: no such folder, or the site cannot be written.
    """
    sources = {source.key: source for source in find_sources(folder, out)}
    found = [read_record(source, out / "runs" / f"{key}.json") for key, source in sources.items()]
    records = tuple(each for each in found if isinstance(each, Record))
    unreadable = tuple(each for each in found if isinstance(each, Unreadable))
    site = Site(
        out / "index.html", _newest_first(records), tuple(group_records(records)), unreadable
    )
    _write_runs(site, _write_reports(site.records, sources, out, reports), out)
    with style():
        for view in site.groups:
            write_text(out / "groups" / f"{view.group.key}.html", _group_page(view, site.groups))
    write_text(out / "feed.json", to_json(feed(site)) + "\n")
    write_text(out / "badge.svg", badge(len(site.open_regressions)))
    write_text(site.index, _index_page(site))
    return site


def _newest_first(records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(sorted(records, key=lambda each: (each.created, each.key), reverse=True))


def _write_reports(
    records: Sequence[Record], sources: Mapping[str, Source], out: Path, most: int
) -> set[str]:
    """Writes reports of the newest runs that have none of their present state; who has one."""
    from reports.page import build

    index = out / "runs" / "reports.json"
    made = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    current = set()
    for record in records:
        digest, page = sources[record.key].digest, out / "runs" / f"{record.key}.report.html"
        if (
            record.kind == "run"
            and most > 0
            and not (made.get(record.key) == digest and page.exists())
        ):
            build([sources[record.key].path], page)
            made[record.key], most = digest, most - 1
        if made.get(record.key) == digest:
            current.add(record.key)
    write_text(index, to_json(made) + "\n")
    return current


def _write_runs(site: Site, reported: Container[str], out: Path) -> None:
    changes: dict[str, list[Change]] = {}
    for change in (change for view in site.groups for change in view.changes):
        changes.setdefault(change.after.key, []).append(change)
    for record in site.records:
        report = f"{record.key}.report.html" if record.key in reported else None
        page = _run_page(record, changes.get(record.key, ()), report)
        write_text(out / "runs" / f"{record.key}.html", page)


def _index_page(site: Site) -> str:
    return render_template(
        "dashboard_index.html.j2",
        title="Benchmark dashboard",
        site=site,
        differing=_differing(site.groups),
        short_revision=short_revision,
    )


def _group_page(view: GroupView, groups: Sequence[GroupView]) -> str:
    styles = method_styles({line for setting in view.settings for line in setting.lines})
    return render_template(
        "dashboard_group.html.j2",
        title=f"{view.group.pair} on {view.group.machine}",
        view=view,
        differing=_differing(groups)[view.group.key],
        settings=[
            _setting_view(f"s{number}", setting, view.changes, styles)
            for number, setting in enumerate(view.settings, start=1)
        ],
        records=view.records[::-1],
        shown=SHOWN,
        short_revision=short_revision,
    )


def _run_page(record: Record, changes: Sequence[Change], report: str | None) -> str:
    settings: dict[str, list[_Figure]] = {}
    for seen in record.observations:
        metric = METRICS[seen.metric]
        figure = _Figure(seen.line, metric.label, _value(seen.estimate, metric.digits))
        settings.setdefault(seen.setting, []).append(figure)
    return render_template(
        "dashboard_run.html.j2",
        title=record.source,
        record=record,
        report=report,
        settings=settings,
        changes=changes,
        short_revision=short_revision,
    )


def _setting_view(
    anchor: str, setting: Setting, changes: Iterable[Change], styles: Mapping[str, MethodStyle]
) -> _SettingView:
    names = [name for name in METRICS if any(each.name == name for each in setting.series)]
    own = [change for change in changes if change.series.setting == setting.name]
    charts = []
    if len(setting.runs) > 1:
        for name in names:
            series = [each for each in setting.series if each.name == name]
            steps = [change for change in own if change.series.name == name]
            svg = draw_series(f"{anchor}-{name}", setting.runs, series, steps, styles)
            charts.append(_Chart(METRICS[name].label, svg))
    rows = tuple(_latest(line, setting, names, styles) for line in setting.lines)
    labels = tuple(METRICS[name].label for name in names)
    return _SettingView(anchor, setting.name, len(setting.runs), labels, rows, tuple(charts))


def _latest(
    line: str, setting: Setting, names: Sequence[str], styles: Mapping[str, MethodStyle]
) -> _LatestRow:
    own = {each.name: each for each in setting.series if each.line == line}
    runs = max(len(each.points) for each in own.values())
    values = tuple(_last(own[name]) if name in own else None for name in names)
    return _LatestRow(styles[line].variable, line, runs, values)


def _last(series: Series) -> Value:
    return _value(series.points[-1].estimate, series.metric.digits)


def _value(estimate: Estimate, digits: int) -> Value:
    if estimate.low is None or estimate.high is None:
        return Value(f"{estimate.value:,.{digits}f}")
    interval = f"[{estimate.low:,.{digits}f}, {estimate.high:,.{digits}f}]"
    return Value(f"{estimate.value:,.{digits}f}", interval)


def _differing(groups: Sequence[GroupView]) -> dict[str, tuple[str, ...]]:
    """For each group that shares machine and pair names with another: what tells it from those."""
    found = {}
    for view in groups:
        alike = [
            other.group.identity
            for other in groups
            if (other.group.machine, other.group.pair) == (view.group.machine, view.group.pair)
        ]
        names = sorted({name for identity in alike for name in identity})
        found[view.group.key] = tuple(
            f"{name}: {view.group.identity.get(name)}"
            for name in names
            if len({repr(identity.get(name)) for identity in alike}) > 1
        )
    return found
