"""The measuring part of a run: what is left of it, and the manifest kept meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.conditions import Conditions
from harness.errors import HarnessError
from harness.execution import Failure
from harness.interrupts import uninterrupted
from harness.launch.launcher import Launcher
from harness.messages import first_line
from harness.plan import Cell, WorkItem
from harness.preparation import Prepared
from harness.progress import Progress
from harness.records import SkippedRequest
from harness.store import RunStore, Status, finished_items


class Session:
    """Goes through the items that are not stored yet; the host of whatever measures them.

    Attributes:
        failures: cells that ended early.
    """

    def __init__(
        self, prepared: Prepared, store: RunStore, progress: Progress, launcher: Launcher
    ) -> None:
        self.failures: dict[Cell, Failure] = {}
        self._prepared = prepared
        self._store = store
        self._progress = progress
        self._launcher = launcher
        self._decoders: dict[str, dict[str, Any]] = dict(store.manifest.get("decoders", {}))
        finished = finished_items(store.directory)
        plan = prepared.workload().plan
        self._cells = {item.id: item.cell for item in plan}
        self._left = {item.id: item for item in plan if item.id not in finished}

    def run(self) -> Status:
        """Measures; when it ends, however, the parts are merged and the status is written.

        Raises:
            StoreError: a run directory that cannot be written; finished parts stay as they are.
        """
        status: Status = "failed"
        try:
            self._progress.begin(len(self._left))
            items = tuple(self._left.values())
            self._launcher.measure(self._prepared, items, self._store.directory, self)
            status = "failed" if self.failures else "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        with uninterrupted():
            self._store.update(decoders=self._decoders)
            self._store.finalise(status)
        return status

    def note(self, text: str) -> None:
        """See `harness.execution.Host`."""
        self._progress.note(text)

    def opened(self, cell: str, decoder: dict[str, Any]) -> None:
        """See `harness.execution.Host`."""
        new = cell not in self._decoders
        self._decoders[cell] = decoder
        if new:
            self._store.update(decoders=self._decoders)

    def begin(self, item: str) -> None:
        """See `harness.execution.Host`."""
        self._progress.item(item)

    def measured(self, item: str, skipped: list[dict[str, Any]]) -> None:  # noqa: ARG002 - Host's
        """See `harness.execution.Host`."""
        self._store.record_skipped(tuple(SkippedRequest(**row) for row in skipped))

    def ended(self, item: str, tokens: int, decode_ns: int) -> None:
        """See `harness.execution.Host`."""
        self._left.pop(item)
        self._progress.done(item, tokens, decode_ns)

    def failed(self, item: str, error: str, message: str) -> None:
        """See `harness.execution.Host`."""
        failure = Failure(item, error, message)
        self.failures[self._cells[item]] = failure
        self._store.update(failures=[asdict(each) for each in self.failures.values()])
        self._progress.note(f"{item} failed: {error}: {message}")

    def left(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """See `harness.launch.launcher.RunHost`."""
        return [i for i in items if i.id in self._left and i.cell not in self.failures]

    def again(self, items: Sequence[WorkItem]) -> None:
        """See `harness.launch.launcher.RunHost`."""
        stored = [i for i in items if i.id not in self._left and i.cell not in self.failures]
        if stored:
            self._store.forget(item.id for item in stored)
            self._left.update({item.id: item for item in stored})
            self._progress.more(len(stored))

    def abandon(self, items: Sequence[WorkItem], error: HarnessError) -> None:
        """See `harness.launch.launcher.RunHost`."""
        unfinished = {item.cell: item.id for item in reversed(self.left(items))}
        for item in unfinished.values():
            self.failed(item, type(error).__name__, first_line(error))

    def observed(self, conditions: Conditions) -> None:
        """See `harness.launch.launcher.RunHost`."""
        self._store.record_conditions(conditions)
