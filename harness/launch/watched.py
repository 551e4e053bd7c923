"""A host that also keeps the conditions of each item, read on the machine that measures it."""

from __future__ import annotations

from typing import Any, cast

from harness.conditions import ConditionsWatch
from harness.execution import Host
from harness.launch.launcher import RunHost


def watched(host: RunHost, watch: ConditionsWatch) -> Host:
    """The host, with counters read when an item begins and when it has been measured."""
    return cast(Host, _Watched(host, watch))


class _Watched:
    def __init__(self, host: RunHost, watch: ConditionsWatch) -> None:
        self._host = host
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def begin(self, item: str) -> None:
        self._host.begin(item)
        self._watch.begin()

    def measured(self, item: str, skipped: list[dict[str, Any]]) -> None:
        if conditions := self._watch.end(item):
            self._host.observed(conditions)
        self._host.measured(item, skipped)
