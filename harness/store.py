"""The run directory: manifest, parts, merged tables. Layout and columns: docs/run-directory.md.

Everything is written beside its place, synced and renamed into it, so a run that is killed at any
moment leaves a readable directory. The manifest's `finished_items` says which items the merged
tables hold; its renaming is the moment at which a merge counts. Every other item is a part.

Knows how rows are kept, not what they mean.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from harness import parts
from harness.atomic_files import PARTIAL, naming, remove, replacing
from harness.conditions import Conditions
from harness.errors import StoreError
from harness.migrations import SCHEMA, migrate_manifest, migrate_table
from harness.parts import PARTS, REQUESTS, ROUNDS, part_items, remove_part, write_part
from harness.records import ItemResult, SkippedRequest
from harness.schemas import requests_schema, rounds_schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Status = Literal["running", "finished", "failed", "interrupted"]

_MANIFEST = "manifest.json"
_CONDITIONS = "conditions.jsonl"


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as read back.

    Attributes:
        manifest: contents of manifest.json.
        requests, rounds: the tables, every item once.
        problems: what could not be read, a line each.
        conditions: of each finished item, where they were recorded.
    """

    manifest: dict[str, Any]
    requests: pd.DataFrame
    rounds: pd.DataFrame
    problems: tuple[str, ...] = ()
    conditions: tuple[Conditions, ...] = ()


class RunStore:
    """Writes one run directory.

    Attributes:
        directory: where.
        manifest: as last written.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest

    @classmethod
    def create(cls, directory: Path, manifest: Mapping[str, Any]) -> Self:
        """Starts a run directory; adds `schema`, `status` and `created` to the manifest.

        Raises:
            StoreError: the directory holds something, or cannot be written.
        """
        with naming(directory):
            refuse_used(directory)
            directory.mkdir(parents=True, exist_ok=True)
        store = cls(directory, {})
        lists: dict[str, list[Any]] = {"failures": [], "skipped_requests": [], "finished_items": []}
        state = {"schema": SCHEMA, "status": "running", "created": _now(), "ended": None}
        store.update(**{**state, **lists, **manifest})
        return store

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Continues a run directory.

        Raises:
            StoreError: no run directory, or one that cannot be read.
        """
        return cls(directory, read_manifest(directory))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes the run meanwhile; a process that is killed leaves no lock.

        What a killed process had only half written is removed first.

        Raises:
            StoreError: another process has it.
        """
        with naming(self.directory):
            descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreError(f"{self.directory}: another process is writing this run") from error
        except OSError:  # a file system without locks
            pass
        try:
            with naming(self.directory):
                for half_written in self.directory.rglob(f"{PARTIAL}*"):
                    remove(half_written)
            yield
        finally:
            os.close(descriptor)

    def update(self, **fields: Any) -> None:
        """Replaces fields of the manifest and writes it. Infinite and NaN become null."""
        manifest = {**self.manifest, **fields}
        write_text(self.directory / _MANIFEST, to_json(manifest) + "\n")
        self.manifest = manifest

    def append_item(self, result: ItemResult) -> None:
        """Stores a finished item: all of it or, when this is killed, nothing."""
        self.record_skipped(result.skipped)
        write_part(self.directory, result)

    def finalise(self, status: Status) -> None:
        """Merges the parts into the tables, writes the status and the end, removes the parts.

        Unreadable parts stay where they are. Killed in between, the directory reads the same.
        """
        tables = _Tables.read(self.directory, self.manifest)
        with naming(self.directory):
            for name, table in ((REQUESTS, tables.requests), (ROUNDS, tables.rounds)):
                with replacing(self.directory / name) as temporary:
                    parts.write_table(table, temporary)
        self.update(status=status, ended=_now(), finished_items=sorted(tables.items))
        if part_items(self.directory) - tables.items:
            for item in tables.items:
                remove_part(self.directory, item)
        elif (self.directory / PARTS).exists():
            with naming(self.directory):
                shutil.rmtree(self.directory / PARTS)

    def forget(self, items: Iterable[str]) -> None:
        """Takes finished items out of the run, to be measured again."""
        gone = set(items)
        merged = [item for item in self.manifest["finished_items"] if item not in gone]
        self.update(finished_items=merged)
        for item in gone:
            remove_part(self.directory, item)

    def record_skipped(self, skipped: tuple[SkippedRequest, ...]) -> None:
        """Adds to `skipped_requests`; every method refuses the same ones, each is listed once."""
        known = self.manifest["skipped_requests"]
        new = [row for row in map(asdict, skipped) if row not in known]
        if new:
            self.update(skipped_requests=[*known, *new])

    def record_conditions(self, conditions: Conditions) -> None:
        """Adds a line; one that a kill has cut short does not spoil it."""
        line = json.dumps(asdict(conditions), allow_nan=False)
        path = self.directory / _CONDITIONS
        with naming(self.directory):
            cut = path.exists() and not path.read_bytes().endswith(b"\n")
            with path.open("a") as file:
                file.write(f"\n{line}\n" if cut else f"{line}\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file of a run directory: all of it or, when this is killed, nothing."""
    with naming(path.parent), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def refuse_used(directory: Path) -> None:
    """Raises `StoreError` unless the directory is absent or empty.

    What a run left that was killed before it had a manifest does not count.
    """
    with naming(directory):
        if not directory.exists():
            return
        if not directory.is_dir() or any(
            not path.name.startswith(PARTIAL) for path in directory.iterdir()
        ):
            raise StoreError(f"{directory}: is not an empty directory; choose another --out")


def read_run(directory: Path) -> RunData:
    """Reads a run, also one that is under way or was killed.

    Raises:
        StoreError: no run directory, a schema newer than this program, or damaged merged tables.
            A damaged part is only named in `problems`.
    """
    manifest = read_manifest(directory)
    tables = _Tables.read(directory, manifest)
    requests = tables.requests.to_pandas()
    requests["output_ids"] = tables.requests["output_ids"].to_pylist()  # plain ints, not NumPy's
    conditions = _read_conditions(directory, tables.items)
    return RunData(manifest, requests, tables.rounds.to_pandas(), tables.problems, conditions)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads manifest.json, an older schema's as one of today's.

    Raises:
        StoreError: absent, damaged, or of a schema newer than this program.
    """
    path = directory / _MANIFEST
    with naming(directory):
        if not path.exists():
            raise StoreError(f"{directory}: is no run directory (it has no {_MANIFEST})")
        text = path.read_text(encoding="utf-8")
    try:
        return migrate_manifest(json.loads(text), path)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path}: is damaged: {error!r}") from error


def finished_items(directory: Path) -> frozenset[str]:
    """Ids of the items that are stored whole and need not be measured again."""
    return frozenset(_Tables.read(directory, read_manifest(directory)).items)


def to_json(value: Any) -> str:
    """Strict JSON, indented; infinite and NaN become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Both tables of a run as Arrow tables, the items in them, and what could not be read."""

    requests: pa.Table
    rounds: pa.Table
    items: set[str]
    problems: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path, manifest: Mapping[str, Any]) -> Self:
        import pyarrow as pa

        merged = set(manifest["finished_items"])
        items, problems = set(merged), []
        requests = [_read_merged(directory / REQUESTS, requests_schema(), merged)]
        rounds = [_read_merged(directory / ROUNDS, rounds_schema(), merged)]
        for item in sorted(part_items(directory) - merged):
            part = directory / PARTS / item
            try:
                tables = (
                    _read(part / REQUESTS, requests_schema()),
                    _read(part / ROUNDS, rounds_schema()),
                )
            except StoreError as error:
                problems.append(str(error))
                continue
            requests.append(tables[0])
            rounds.append(tables[1])
            items.add(item)
        return cls(pa.concat_tables(requests), pa.concat_tables(rounds), items, tuple(problems))


def _read_conditions(directory: Path, items: set[str]) -> tuple[Conditions, ...]:
    """The last line of each item; lines that a kill or a full disk has cut short are left out."""
    path = directory / _CONDITIONS
    with naming(directory):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {}
    for line in text.splitlines():
        with suppress(ValueError):
            conditions = Conditions.from_json(line)
            found[conditions.item] = conditions
    return tuple(own for item, own in found.items() if item in items)


def _read_merged(path: Path, schema: pa.Schema, items: set[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not items:
        return schema.empty_table()
    table = _read(path, schema)
    return table.filter(pc.is_in(table["item"], pa.array(sorted(items), pa.string())))


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return migrate_table(pq.read_table(path, partitioning=None), schema, path)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: cannot be read: {reason}") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return value
