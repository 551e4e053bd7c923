"""Parts of a run directory: the rows of one finished item, whole or not there at all.

A part is a folder of two Parquet files, named by its item. Parts are files alone, so that one
written on another machine can be put into a run directory here.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.atomic_files import PARTIAL, naming, sync
from harness.records import ItemResult
from harness.schemas import requests_schema, rounds_schema

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = "parts"
REQUESTS = "requests.parquet"
ROUNDS = "rounds.parquet"
_DEPTH = 6  # an item id is METHOD/DATASET/t/b/r/k, and so is the path of its part


def write_part(directory: Path, result: ItemResult) -> None:
    """Stores an item's rows in a run directory: all of them or, when this is killed, nothing."""
    with _new_part(directory, result.item.id) as folder:
        _write_rows(result.requests, requests_schema(), folder / REQUESTS)
        _write_rows(result.rounds, rounds_schema(), folder / ROUNDS)


def part_files(directory: Path, item: str) -> dict[str, bytes]:
    """The files of a part by their names."""
    part = directory / PARTS / item
    with naming(directory):
        return {file.name: file.read_bytes() for file in sorted(part.iterdir())}


def put_part(directory: Path, item: str, files: Mapping[str, bytes]) -> None:
    """Stores what `part_files` gave, as `write_part` does."""
    with _new_part(directory, item) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
            sync(folder / name)


def remove_part(directory: Path, item: str) -> None:
    """Takes a part out of a run directory, if it is there."""
    part = directory / PARTS / item
    with naming(directory):
        if part.exists():
            shutil.rmtree(part)


def part_items(directory: Path) -> set[str]:
    """Ids of the items that a run directory has a part of."""
    parts = directory / PARTS
    return {
        folder.relative_to(parts).as_posix()
        for folder in parts.glob("/".join("*" * _DEPTH))
        if folder.is_dir()
    }


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a Parquet file and waits until it is on its disk."""
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd")
    sync(path)


@contextmanager
def _new_part(directory: Path, item: str) -> Iterator[Path]:
    """A folder that becomes the item's part when the block ends."""
    parts = directory / PARTS
    part = parts / item
    with naming(directory), ExitStack() as undo:
        part.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parts))
        undo.callback(shutil.rmtree, temporary, ignore_errors=True)  # a full disk needs the room
        yield temporary
        sync(temporary)
        if part.exists():  # a part that could not be read, measured again
            shutil.rmtree(part)
        temporary.rename(part)
        undo.pop_all()
        sync(part.parent)


def _write_rows(rows: tuple[Any, ...], schema: pa.Schema, path: Path) -> None:
    import pyarrow as pa

    write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), path)
