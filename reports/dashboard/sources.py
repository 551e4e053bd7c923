"""Run directories and benchmark files below a folder, and their records, read once.

A record is kept with a digest of its source and of this program; while both are the same, it is
taken from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import harness
import reports
from harness.errors import HarnessError, StoreError
from reports.dashboard.benchmarks import benchmark_record, is_benchmark
from reports.dashboard.records import Record, Unreadable
from reports.dashboard.runs import run_record
from reports.templating import write_text

_MANIFEST = "manifest.json"
_TABLES = (_MANIFEST, "requests.parquet", "rounds.parquet")


@dataclass(frozen=True)
class Source:
    """A run directory or a JSON file.

    Attributes:
        path: where.
        name: below the folder that was searched.
        key: names its page: a readable part and a digest of `name`.
    """

    path: Path
    name: str

    @property
    def key(self) -> str:
        readable = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[-40:].strip("-")
        return f"{readable or 'run'}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def is_run(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def digest(self) -> str:
        """Of the program and of the names, sizes and times of the source's files."""
        files = self._files() if self.is_run else [self.path]
        state = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists()]
        return hashlib.sha256(repr((_program(), self.name, state)).encode()).hexdigest()

    def _files(self) -> list[Path]:
        parts = sorted((self.path / "parts").rglob("*.parquet"))
        return [*(self.path / name for name in _TABLES), *parts]


@dataclass(frozen=True)
class _Stored:
    digest: str
    record: Record


_STORED = TypeAdapter(_Stored)


def find_sources(folder: Path, leave_out: Path) -> list[Source]:
    """Run directories and JSON files below a folder, or the folder itself; not below `leave_out`.

    Raises:
        StoreError: there is no such folder.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}: is no folder of run directories")
    return [
        Source(path, path.relative_to(folder).as_posix() if path != folder else folder.name)
        for path in _walk(folder, leave_out.resolve())
    ]


def _walk(folder: Path, leave_out: Path) -> Iterator[Path]:
    for at, folders, files in os.walk(folder):
        here = Path(at)
        if _MANIFEST in files:
            folders.clear()
            yield here
            continue
        folders[:] = sorted(name for name in folders if (here / name).resolve() != leave_out)
        yield from (here / name for name in sorted(files) if name.endswith(".json"))


def read_record(source: Source, kept: Path) -> Record | Unreadable | None:
    """The record of a source; None for a JSON file that is none of pytest-benchmark's.

    Args:
        source: where to read.
        kept: the file that holds the record from an earlier time, written anew where it must be.
    """
    digest = source.digest
    if (known := _kept(kept, digest)) is not None:
        return known
    try:
        record = _read(source)
    except (HarnessError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        told = str(error) if isinstance(error, HarnessError) else f"is damaged: {error!r}"
        return Unreadable(source.name, " ".join(told.split()))
    if record is not None:
        write_text(kept, _STORED.dump_json(_Stored(digest, record), indent=1).decode())
    return record


def _kept(path: Path, digest: str) -> Record | None:
    try:
        stored = _STORED.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return stored.record if stored.digest == digest else None


def _read(source: Source) -> Record | None:
    from harness.store import read_run

    if source.is_run:
        return run_record(read_run(source.path), source.key, source.name)
    contents = json.loads(source.path.read_bytes())
    return benchmark_record(contents, source.key, source.name) if is_benchmark(contents) else None


@cache
def _program() -> str:
    """A digest of the source text of the harness and the reports."""
    digest = hashlib.sha256()
    for package in (harness, reports):
        folder = Path(package.__file__ or "").parent
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".j2", ".css")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
