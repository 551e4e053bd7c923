"""Files and folders that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import StoreError

PARTIAL = ".partial-"  # names of what is being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path whose contents take the place of `path`, whole, when the block ends."""
    temporary = path.with_name(f"{PARTIAL}{path.name}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise
    sync(path.parent)


@contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Turns the system's errors (disk full, read-only, ...) into one line that names the place."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        reason = os.strerror(error.errno) if error.errno else error  # not in a library's own words
        raise StoreError(f"{where}: {reason}") from error


def sync(path: Path) -> None:
    """Waits until a file or a folder is on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file, or a folder with all that it holds."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
