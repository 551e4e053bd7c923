"""Goes through a run's work items: a cell that fails is recorded and left, the others go on."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from typing import Any

from harness.decoder_pool import DecoderPool
from harness.errors import HarnessError
from harness.interrupts import uninterrupted
from harness.measure import heap_frozen, run_item
from harness.messages import first_line
from harness.plan import Cell, WorkItem
from harness.progress import Progress
from harness.store import RunStore, Status, finished_items
from harness.workload import Workload


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that ended early, as it stands in the manifest.

    Attributes:
        item: the work item at which it failed; the cell's later items were not measured.
        error: class of the exception.
        message: its first line.
    """

    item: str
    error: str
    message: str


class Execution:
    """The measuring part of a run.

    Attributes:
        failures: cells that ended early.
    """

    def __init__(
        self, workload: Workload, pool: DecoderPool, store: RunStore, progress: Progress
    ) -> None:
        self.failures: dict[Cell, Failure] = {}
        self._workload = workload
        self._pool = pool
        self._store = store
        self._progress = progress
        self._decoders: dict[str, dict[str, Any]] = dict(store.manifest.get("decoders", {}))
        finished = finished_items(store.directory)
        self._items = [item for item in workload.plan if item.id not in finished]

    def run(self) -> Status:
        """Measures every item that is not stored yet.

        However that ends, draft processes are ended and the run is finalised.
        """
        status: Status = "failed"
        try:
            self._warm_up()
            with heap_frozen():
                self._measure()
            status = "failed" if self.failures else "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            with uninterrupted():
                self._end(status)
        return status

    def _warm_up(self) -> None:
        """Opens and warms all decoders, so that none is created while cells take turns."""
        first_items = {item.cell: item for item in reversed(self._items)}
        for cell in dict.fromkeys(item.cell for item in self._items):
            self._progress.note(f"warming up {cell.id}")
            try:
                self._pool.get(cell)
                self._decoders[cell.id] = self._pool.describe(cell)
            except Exception as error:  # noqa: BLE001 - a failing method must not end the others
                self._fail(first_items[cell], error)
        self._store.update(decoders=self._decoders)

    def _measure(self) -> None:
        self._progress.begin(len(self._items))
        for item in self._items:
            self._progress.item(item.id)
            tokens, decode_ns = (0, 0) if item.cell in self.failures else self._measure_item(item)
            self._progress.done(tokens, decode_ns)

    def _measure_item(self, item: WorkItem) -> tuple[int, int]:
        """Measures and stores one item; gives its tokens and the duration of its steps."""
        requests, categories = self._workload.requests(item), self._workload.categories(item)
        try:
            decoder = self._pool.get(item.cell)
            limit = self._workload.config.max_rounds
            result = run_item(decoder, item, requests, categories, max_rounds=limit)
            self._decoders[item.cell.id] = self._pool.describe(item.cell)
        except Exception as error:  # noqa: BLE001 - a failing method must not end the others
            self._fail(item, error)
            return 0, 0
        self._store.append_item(result)
        return result.tokens, result.decode_ns

    def _fail(self, item: WorkItem, error: Exception) -> None:
        failure = Failure(item.id, type(error).__name__, first_line(error))
        self.failures[item.cell] = failure
        self._pool.discard(item.cell)
        self._store.update(failures=[asdict(each) for each in self.failures.values()])
        self._progress.note(f"{failure.item} failed: {failure.error}: {failure.message}")
        if not isinstance(error, HarnessError):  # a bug: whoever mends it needs the traceback
            self._progress.note("".join(traceback.format_exception(error)))

    def _end(self, status: Status) -> None:
        try:
            self._pool.close()
        finally:
            self._store.update(decoders=self._decoders)
            self._store.finalise(status)
