"""The progress of a run on stderr: a bar on a terminal, plain lines elsewhere.

Nothing is drawn while an item is measured: the bar has no refresh thread, it is redrawn between
items only, so that showing progress takes no time from the measured cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar


class Progress(Protocol):
    """Where a run says how far it is."""

    def note(self, text: str) -> None:
        """One line about what happens outside the items (loading, a failed cell, ...)."""

    def download(self, name: str, done: int, total: int) -> None:
        """`done` of about `total` bytes of a file are here."""

    def count(self, what: str, done: int, total: int) -> None:
        """`done` of at most `total` pieces of some work outside the items are done."""

    def begin(self, total: int) -> None:
        """The number of work items to come."""

    def more(self, items: int) -> None:
        """So many more items are to come."""

    def item(self, name: str) -> None:
        """An item is about to be measured."""

    def done(self, name: str, tokens: int, decode_ns: int) -> None:
        """The item has ended: tokens emitted and the time that its steps took."""

    def close(self) -> None:
        """Leaves the terminal clean. Safe to call more than once."""


def progress(stream: TextIO) -> Progress:
    """A bar when the stream is a terminal, else plain lines."""
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def time_left(elapsed_s: float, done: int, total: int) -> str:
    """Time left, at the mean pace so far, as m:ss; `-:--` before the first item has ended."""
    if not done:
        return "-:--"
    seconds = round(elapsed_s / done * (total - done))
    return f"{seconds // 60}:{seconds % 60:02d}"


def tokens_per_second(tokens: int, decode_ns: int) -> str:
    """The rate of one item; a dash when nothing was measured."""
    return f"{tokens * 1e9 / decode_ns:.1f} tok/s" if decode_ns else "- tok/s"


class LineProgress:
    """One plain line for every item that has ended."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total = self._done = 0
        self._began = 0.0
        self._shown_tenth = ("", -1)  # what the last line was about, tenths of it that it said

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def download(self, name: str, done: int, total: int) -> None:
        if self._another_tenth(name, done, total):
            self.note(f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def count(self, what: str, done: int, total: int) -> None:
        if self._another_tenth(what, done, total):
            self.note(f"{what}: {done} of {total}")

    def begin(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, self._clock()

    def more(self, items: int) -> None:
        self._total += items

    def item(self, name: str) -> None:
        pass  # its line is written when it has ended

    def done(self, name: str, tokens: int, decode_ns: int) -> None:
        self._done += 1
        left = time_left(self._clock() - self._began, self._done, self._total)
        rate = tokens_per_second(tokens, decode_ns)
        count = f"[{self._done:{len(str(self._total))}}/{self._total}]"
        self.note(f"{count} {name}  {rate}  {left} left")

    def close(self) -> None:
        pass

    def _another_tenth(self, what: str, done: int, total: int) -> bool:
        tenth = (what, 10 * done // total if total else 0)
        another = tenth != self._shown_tenth
        self._shown_tenth = tenth
        return another


class BarProgress(LineProgress):
    """One bar over the whole run with the current cell, the last rate and the time left."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        super().__init__(stream, clock)
        self._console = Console(file=stream)
        self._bar: RichBar | None = None
        self._name = ""  # of the item that began last
        self._rate = tokens_per_second(0, 0)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def begin(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().begin(total)
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}  {task.fields[left]} left  {task.description}"),
        )
        self._bar = Progress(*columns, console=self._console, auto_refresh=False)
        self._bar.add_task("", total=total, rate=self._rate, left="-:--")
        self._bar.start()

    def more(self, items: int) -> None:
        super().more(items)
        self._update()

    def item(self, name: str) -> None:
        self._name = name
        self._update()

    def done(self, name: str, tokens: int, decode_ns: int) -> None:  # noqa: ARG002 - as a line has
        self._done += 1
        self._rate = tokens_per_second(tokens, decode_ns)
        self._update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update(self) -> None:
        if self._bar is None:
            return
        self._bar.update(
            self._bar.task_ids[0],
            total=self._total,
            completed=self._done,
            description=self._name,
            rate=self._rate,
            left=time_left(self._clock() - self._began, self._done, self._total),
            refresh=True,
        )
