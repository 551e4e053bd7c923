"""The measuring part of a run: batches of items in their order, and the manifest kept meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.conditions import watch
from harness.errors import HarnessError, StoreError
from harness.execution import Failure
from harness.interrupts import uninterrupted
from harness.messages import first_line
from harness.plan import Cell, WorkItem
from harness.preparation import Prepared
from harness.progress import Progress
from harness.records import SkippedRequest
from harness.store import RunStore, Status, finished_items
from harness.tasks import Tasks


class Session:
    """Goes through the items that are not stored yet; the host of whatever measures them.

    Attributes:
        failures: cells that ended early.
    """

    def __init__(
        self, prepared: Prepared, store: RunStore, progress: Progress, tasks: Tasks
    ) -> None:
        self.failures: dict[Cell, Failure] = {}
        self._prepared = prepared
        self._store = store
        self._progress = progress
        self._tasks = tasks
        fingerprint = store.manifest.get("fingerprint", {})
        self._watch = watch(prepared.config.placement, fingerprint)
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
            for batch in self._tasks.batches(tuple(self._left.values())):
                self._measure([item for item in batch if item.cell not in self.failures])
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
        self._watch.begin()

    def measured(self, item: str, skipped: list[dict[str, Any]]) -> None:
        """See `harness.execution.Host`."""
        if conditions := self._watch.end(item):
            self._store.record_conditions(conditions)
        self._store.record_skipped(tuple(SkippedRequest(**row) for row in skipped))

    def ended(self, item: str, tokens: int, decode_ns: int) -> None:
        """See `harness.execution.Host`."""
        self._left.pop(item)
        self._progress.done(tokens, decode_ns)

    def failed(self, item: str, error: str, message: str) -> None:
        """See `harness.execution.Host`."""
        failure = Failure(item, error, message)
        self.failures[self._cells[item]] = failure
        self._store.update(failures=[asdict(each) for each in self.failures.values()])
        self._progress.note(f"{item} failed: {error}: {message}")

    def _measure(self, items: Sequence[WorkItem]) -> None:
        """One batch; when it cannot go on, its unfinished cells fail with the reason."""
        if not items:
            return
        try:
            self._tasks.measure(self._prepared, items, self._store.directory, self)
        except StoreError:
            raise
        except HarnessError as error:
            unfinished = {i.cell: i.id for i in reversed(items) if i.id in self._left}
            for cell, item in unfinished.items():
                if cell not in self.failures:
                    self.failed(item, type(error).__name__, first_line(error))
