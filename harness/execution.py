"""Measures work items in this process: a cell that fails is told and left, the others go on."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.decoder_pool import DecoderPool
from harness.errors import HarnessError, PlacementError, StoreError
from harness.interrupts import uninterrupted
from harness.measure import heap_frozen, run_item
from harness.messages import first_line
from harness.parts import write_part
from harness.plan import Cell, WorkItem
from harness.preparation import Prepared, resolve_methods
from harness.store import read_manifest
from harness.tuning.usage import stored_choices, with_choices
from harness.workload import Workload


class Host(Protocol):
    """Who keeps what is measured, in this process or in the one that started it.

    Every call returns before anything more is measured. Arguments are JSON values.
    """

    def note(self, text: str) -> None:
        """One line about what happens outside the items."""

    def opened(self, cell: str, decoder: dict[str, Any]) -> None:
        """A cell's decoder is warm, or has measured another item: what the manifest keeps."""

    def begin(self, item: str) -> None:
        """An item is about to be measured."""

    def measured(self, item: str, skipped: list[dict[str, Any]]) -> None:
        """The item has been measured, these requests refused; its rows are not stored yet."""

    def ended(self, item: str, tokens: int, decode_ns: int) -> None:
        """The item's rows are stored, or its cell has failed (nothing was measured)."""

    def failed(self, item: str, error: str, message: str) -> None:
        """The item's cell has failed at it and is left."""


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


def execute(prepared: Prepared, items: Sequence[WorkItem], directory: Path, host: Host) -> None:
    """Measures items in their order and stores each as a part of a run directory.

    The process is confined to the cores of the method meanwhile.

    Args:
        prepared: the run that they are of.
        items: some of its plan.
        directory: the run directory.
        host: told what happens.

    Raises:
        StoreError: a part that cannot be written.
        PlacementError: cores or threads are not as they were set, before or behind an item.
    """
    from impl.engine import placement

    with placement.applied(prepared.config.placement.rank_cores(0)):
        workload = prepared.workload()
        choices = stored_choices(read_manifest(directory))
        methods = with_choices(resolve_methods(prepared.config), choices)
        models = prepared.models()
        pool = DecoderPool(methods, models, workload, prepared.config, placement.apply)
        try:
            _Execution(workload, pool, directory, host).run(items)
        finally:
            with uninterrupted():
                pool.close()


class _Execution:
    def __init__(self, workload: Workload, pool: DecoderPool, directory: Path, host: Host) -> None:
        self._workload = workload
        self._pool = pool
        self._directory = directory
        self._host = host
        self._failed: set[Cell] = set()

    def run(self, items: Sequence[WorkItem]) -> None:
        self._warm_up(items)
        with heap_frozen():
            for item in items:
                self._host.begin(item.id)
                tokens, decode_ns = (0, 0) if item.cell in self._failed else self._measure(item)
                self._host.ended(item.id, tokens, decode_ns)

    def _warm_up(self, items: Sequence[WorkItem]) -> None:
        """Opens and warms all decoders, so that none is created while cells take turns."""
        first_items = {item.cell: item for item in reversed(items)}
        for cell in dict.fromkeys(item.cell for item in items):
            self._host.note(f"warming up {cell.id}")
            try:
                self._pool.get(cell)
                self._host.opened(cell.id, self._pool.describe(cell))
            except Exception as error:  # noqa: BLE001 - a failing method must not end the others
                self._fail(first_items[cell], error)

    def _measure(self, item: WorkItem) -> tuple[int, int]:
        """Measures and stores one item; gives its tokens and the duration of its steps."""
        from impl.engine import placement

        requests, categories = self._workload.requests(item), self._workload.categories(item)
        try:
            decoder = self._pool.get(item.cell)
            limit = self._workload.config.max_rounds
            placement.check_applied(self._pool.cores)
            result = run_item(decoder, item, requests, categories, max_rounds=limit)
            placement.check_applied(self._pool.cores)
            described = self._pool.describe(item.cell)
        except Exception as error:  # noqa: BLE001 - a failing method must not end the others
            self._fail(item, error)
            return 0, 0
        self._host.measured(item.id, [asdict(row) for row in result.skipped])
        self._host.opened(item.cell.id, described)
        write_part(self._directory, result)
        return result.tokens, result.decode_ns

    def _fail(self, item: WorkItem, error: Exception) -> None:
        if isinstance(error, StoreError | PlacementError):  # not the one cell's matter
            raise error
        self._failed.add(item.cell)
        self._pool.discard(item.cell)
        self._host.failed(item.id, type(error).__name__, first_line(error))
        if not isinstance(error, HarnessError):  # a bug: whoever mends it needs the traceback
            self._host.note("".join(traceback.format_exception(error)))
