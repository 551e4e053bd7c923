"""The site for programs: a JSON feed and an SVG badge."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reports.dashboard.records import Group, Record
from reports.templating import render_template

if TYPE_CHECKING:
    from reports.dashboard.series import Change, GroupView, Series, Site

SCHEMA = 1

_LETTER = 6.7  # CSS pixels, wide enough for 11 px sans-serif
_MARGIN = 10.0


def feed(site: Site) -> dict[str, Any]:
    """Every run, series and step; JSON values only. The names in it are fixed."""
    return {
        "schema": SCHEMA,
        "open_regressions": len(site.open_regressions),
        "runs": [_run(record) for record in site.records],
        "groups": [_group(view) for view in site.groups],
        "unreadable": [asdict(each) for each in site.unreadable],
    }


def badge(regressions: int) -> str:
    """An SVG of two fields: what it is about, and how many regressions are open."""
    label = "benchmarks"
    value = (
        f"{regressions} regression{'s' * (regressions != 1)}" if regressions else "no regression"
    )
    widths = [round(_LETTER * len(text) + 2 * _MARGIN) for text in (label, value)]
    return render_template(
        "badge.svg.j2", label=label, value=value, widths=widths, bad=bool(regressions)
    )


def _run(record: Record) -> dict[str, Any]:
    fields = ("key", "source", "kind", "created", "status", "revision", "dirty", "methods")
    told = {field: getattr(record, field) for field in (*fields, "lossless", "failures")}
    return {**told, "group": record.group.key, "page": f"runs/{record.key}.html"}


def _group(view: GroupView) -> dict[str, Any]:
    group: Group = view.group
    return {
        "key": group.key,
        "machine": group.machine,
        "pair": group.pair,
        "identity": group.identity,
        "page": f"groups/{group.key}.html",
        "series": [_series(each) for setting in view.settings for each in setting.series],
        "changes": [_change(each) for each in view.changes],
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "setting": series.setting,
        "line": series.line,
        "metric": series.name,
        "points": [{"run": point.record.key, **asdict(point.estimate)} for point in series.points],
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "setting": change.series.setting,
        "line": change.series.line,
        "metric": change.series.name,
        "before": change.step.before,
        "after": change.step.after,
        "change": change.step.change,
        "gate": change.gate,
        "regression": change.regression,
        "open": change.open,
        "last_run_before": change.before.key,
        "first_run_after": change.after.key,
        "commits": [change.before.revision, change.after.revision],
    }
