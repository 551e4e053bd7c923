"""Progress lines and the bar, by a fake clock."""

import io

import pytest

from harness.progress import BarProgress, LineProgress, Progress, progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def two_of_three_items(shown: Progress, clock: Clock) -> None:
    """30 tokens in 2 s of decoding at second 20, then an item that measured nothing at 50."""
    shown.begin(3)
    shown.item("ar/mini/t0/b1/r0/k0")
    clock.now = 20
    shown.done("ar/mini/t0/b1/r0/k0", 30, 2_000_000_000)
    shown.item("sd/mini/t0/b1/r0/k0")
    clock.now = 50
    shown.done("sd/mini/t0/b1/r0/k0", 0, 0)


def test_lines_say_cell_rate_and_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    two_of_three_items(LineProgress(stream, clock), clock)
    assert stream.getvalue().splitlines() == [
        "[1/3] ar/mini/t0/b1/r0/k0  15.0 tok/s  0:40 left",
        "[2/3] sd/mini/t0/b1/r0/k0  - tok/s  0:25 left",
    ]


def test_items_of_several_machines_are_told_by_their_names_and_counted_together() -> None:
    clock, stream = Clock(), io.StringIO()
    shown = LineProgress(stream, clock)
    shown.begin(2)
    for name in "ab":
        shown.item(name)
    clock.now = 10
    shown.done("a", 0, 0)
    shown.more(2)  # a machine was lost: its items again
    shown.done("b", 0, 0)
    assert stream.getvalue().splitlines() == [
        "[1/2] a  - tok/s  0:10 left",
        "[2/4] b  - tok/s  0:10 left",
    ]


def test_other_work_is_told_in_tenths() -> None:
    stream = io.StringIO()
    shown = LineProgress(stream, Clock())
    for done in range(1, 41):
        shown.count("outputs", done, 40)
    told = stream.getvalue().splitlines()
    assert told[:3] == ["outputs: 1 of 40", "outputs: 4 of 40", "outputs: 8 of 40"]
    assert told[-1] == "outputs: 40 of 40"
    assert len(told) == 11


def test_the_bar_is_drawn_between_items_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    shown = BarProgress(stream, clock)
    before = threading.active_count()
    two_of_three_items(shown, clock)
    assert threading.active_count() == before
    assert "2/3" in stream.getvalue()
    assert "15.0 tok/s" in stream.getvalue()
    assert "0:25 left" in stream.getvalue()
    shown.close()
    shown.close()


def test_a_terminal_gets_the_bar_and_a_file_gets_lines() -> None:
    assert isinstance(progress(Terminal()), BarProgress)
    assert not isinstance(progress(io.StringIO()), BarProgress)


def test_a_download_is_a_line_for_each_tenth() -> None:
    stream = io.StringIO()
    shown = LineProgress(stream)
    for done in (0, 4_000_000, 10_000_000, 12_000_000, 100_000_000):
        shown.download("target.gguf", done, 100_000_000)
    assert stream.getvalue().splitlines() == [
        "target.gguf: 0 of 100 MB",
        "target.gguf: 10 of 100 MB",
        "target.gguf: 100 of 100 MB",
    ]
