"""Data files: records out of JSONL, JSON or Parquet, each file checked against its SHA-256."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from harness.cache import FirstUse
from harness.errors import DatasetError
from harness.messages import first_line

MOST_BYTES = 2 << 30  # of a data file, and of what a compressed one may grow to
MOST_LINE_BYTES = 64 << 20  # of a line; a prompt of a million tokens has some 5 MB


class AbsentSourceError(DatasetError):
    """This source is not to be had here; the next one is tried."""


class Row(NamedTuple):
    """A record of a dataset file; `where` names it in errors."""

    where: str
    fields: Mapping[str, Any]


class Pin(NamedTuple):
    """What holds a file to its content.

    Attributes:
        sha256: the sum that the registry declares; None where it has none.
        by_commit: the place that it came from cannot change (a commit).
        name: what the file is called in the record of first uses.
        first_use: that record, for a file that nothing else holds.
    """

    sha256: str | None
    by_commit: bool
    name: str
    first_use: FirstUse


def pinned_rows(path: Path, pin: Pin, most: int | None = None) -> list[Row]:
    """The records of a file whose content is what it should be.

    Args:
        path: a `.jsonl`, `.jsonl.gz`, `.json` (a list of objects) or `.parquet` file.
        pin: what it is checked against.
        most: only the first so many records; None is all.

    Raises:
        AbsentSourceError: no such file.
        DatasetError: altered, too large or malformed; the message has file and line.
    """
    content = file_bytes(path)
    check_sum(path, hashlib.sha256(content).hexdigest(), pin)
    return list(islice(_records(path, content), most))


def check_sum(path: Path, found: str, pin: Pin) -> None:
    """Raises `DatasetError`, naming both sums, unless a file has the sum that it should have."""
    if pin.sha256 is not None:
        if found != pin.sha256:
            raise DatasetError(f"{path}: sha256 is {found}, the registry expects {pin.sha256}")
        return
    if pin.by_commit:
        return
    expected = pin.first_use.expected(pin.name)
    if expected is not None and expected != found:
        raise DatasetError(
            f"{path}: sha256 is {found}, but at its first use it was {expected}; to trust it "
            f"from now on, remove {pin.name!r} from {pin.first_use.path}"
        )
    pin.first_use.record(pin.name, found)


def jsonl_rows(path: Path) -> list[Row]:
    """The records of a JSONL file (UTF-8; blank lines are passed over).

    Raises:
        DatasetError: absent, unreadable or malformed; the message has file and line.
    """
    return list(_jsonl(path, file_bytes(path)))


def file_bytes(path: Path) -> bytes:
    """What is in a file of bearable size."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DatasetError(f"{path}: is larger than {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise AbsentSourceError(f"{path}: no such file") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error


def _records(path: Path, content: bytes) -> Iterable[Row]:
    if path.suffix == ".gz":
        return _jsonl(path, _decompressed(path, content))
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".json":
        return _json_list(path, content)
    return _jsonl(path, content)


def _decompressed(path: Path, content: bytes) -> bytes:
    try:
        plain = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: is no gzip file: {first_line(error)}") from error
    if len(plain) > MOST_BYTES:
        raise DatasetError(f"{path}: grows to more than {MOST_BYTES >> 20} MiB")
    return plain


def _jsonl(path: Path, content: bytes) -> Iterable[Row]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if len(line) > MOST_LINE_BYTES:
            raise DatasetError(f"{where}: the line is longer than {MOST_LINE_BYTES >> 20} MiB")
        yield Row(where, _object(where, line))


def _object(where: str, text: bytes) -> dict[str, Any]:
    fields = _parse(where, text)
    if not isinstance(fields, dict):
        raise DatasetError(f"{where}: must be a JSON object")
    return fields


def _parse(where: str, text: bytes) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\u" in text:  # an escaped half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: is no JSON in UTF-8: {first_line(error)}") from error
    return value


def _json_list(path: Path, content: bytes) -> Iterable[Row]:
    records = _parse(str(path), content)
    if not isinstance(records, list):
        raise DatasetError(f"{path}: must be a list of JSON objects")
    for number, fields in enumerate(records):
        where = f"{path} record {number}"
        if not isinstance(fields, dict):
            raise DatasetError(f"{where}: must be a JSON object")
        yield Row(where, fields)


def _parquet(path: Path) -> Iterable[Row]:
    import tempfile

    import datasets

    with tempfile.TemporaryDirectory() as scratch:
        datasets.disable_progress_bars()
        try:
            table = datasets.load_dataset(
                "parquet", data_files=str(path), split="train", cache_dir=scratch
            )
        except Exception as error:  # whatever the library raises for a damaged file
            raise DatasetError(f"{path}: is no Parquet file: {first_line(error)}") from error
        for number, fields in enumerate(table):
            yield Row(f"{path} row {number}", fields)
