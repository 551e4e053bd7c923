"""The checks of a run as a reader wants them: one line a check, its cells below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from harness.checks import Status

if TYPE_CHECKING:
    from reports.results import RunResult

_NAMES = {
    "greedy_equality": "Greedy outputs are those of autoregressive decoding",
    "losslessness": "Outputs follow the target's distribution",
    "aa_control": "AR measured twice is as fast as itself",
    "quiet_machine": "The machine was the run's own",
    "invariants": "Stored rounds add up to the outputs and times",
}
_BADGES = {Status.FAIL: "FAIL", Status.TIE: "TIE", Status.PASS: "PASS", Status.SKIP: "SKIPPED"}


class CheckView(NamedTuple):
    """A check over all its cells; the badge is that of the worst."""

    name: str
    badge: str
    summary: str
    details: tuple[str, ...]


def check_views(result: RunResult) -> Iterator[CheckView]:
    """One view for each name of a check, in the order of the run's checks."""
    for name in dict.fromkeys(check.name for check in result.checks):
        checks = result.checks_named(name)
        statuses = [check.status for check in checks]
        worst = next(status for status in _BADGES if status in statuses)
        counts = (f"{statuses.count(each)} {each}" for each in _BADGES if each in statuses)
        yield CheckView(
            name=_NAMES.get(name, name),
            badge=_BADGES[worst],
            summary=", ".join(counts),
            details=tuple(check.detail for check in checks),
        )
