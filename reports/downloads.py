"""The data of a run inside its page, as links that a browser saves to a file without a network."""

from __future__ import annotations

import base64
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from harness.schemas import requests_schema, rounds_schema
from reports.csv_files import csv_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    import pyarrow as pa

    from harness.store import RunData
    from reports.results import RunResult

ROOM = 2_500_000  # characters of all downloads of a page; charts and tables have the rest of 5 MB
_CSV, _PARQUET = "text/csv;charset=utf-8", "application/vnd.apache.parquet"
_NOT_FLAT = ("categories", "acceptance_by_position")


class Download(NamedTuple):
    """A file of a run.

    Attributes:
        name: to save it under.
        told: what is in it.
        size: in words.
        href: a data: URL; None where the page has no room for it.
    """

    name: str
    told: str
    size: str
    href: str | None


def downloads(key: str, run: RunData, result: RunResult, room: int) -> Iterator[Download]:
    """The cells as CSV, requests and rounds as parquet, each if it fits; none of an empty run.

    Args:
        key: of the run on its page, in front of the file names.
        run: as read.
        result: its summary.
        room: characters that all of them may take.
    """
    if run.requests.empty:
        return
    files = (
        ("cells.csv", "the figures of every cell", _CSV, _cells(result).encode()),
        ("requests.parquet", "a row for each output", _PARQUET, _requests(run)),
        ("rounds.parquet", "a row for each round", _PARQUET, _rounds(run)),
    )
    for name, told, kind, content in files:
        link = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        fits = len(link) <= room
        room -= len(link) if fits else 0
        yield Download(f"{key}-{name}", told, _size(len(content)), link if fits else None)


def _cells(result: RunResult) -> str:
    """One line a cell; nested figures have the names of both levels."""
    import pandas as pd

    rows = [asdict(cell) for cell in result.cells]
    flat = [{name: row[name] for name in row if name not in _NOT_FLAT} for row in rows]
    return csv_text(pd.json_normalize(flat, sep="_"))


def _requests(run: RunData) -> bytes:
    return _parquet(run.requests, requests_schema())


def _rounds(run: RunData) -> bytes:
    return _parquet(run.rounds, rounds_schema())


def _parquet(table: pd.DataFrame, schema: pa.Schema) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    rows = pa.Table.from_pandas(table, schema=schema, preserve_index=False)
    pq.write_table(rows.replace_schema_metadata(), buffer, compression="zstd")
    return buffer.getvalue()


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
