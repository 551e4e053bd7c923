"""Run directories of older schemas, as this program reads them. Nothing on disk is changed.

One step for each schema: a manifest of schema N becomes one of N + 1. Columns that a later schema
added are null in older tables. What each schema changed: docs/run-directory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from harness.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

SCHEMA = 3

ADDED_COLUMNS = frozenset(  # of rounds.parquet
    {
        *("hit_chance", "rank"),  # in schema 2
        "transfer_ns",  # in schema 3
    }
)


def migrate_manifest(manifest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A manifest of any schema up to `SCHEMA` as one of `SCHEMA`.

    Args:
        manifest: as stored.
        path: where, for the error.

    Raises:
        StoreError: it is of a newer schema, or of none that ever was.
    """
    schema = manifest["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise StoreError(f"{path}: has schema {schema!r}, which never was; the file is damaged")
    if schema > SCHEMA:
        raise StoreError(
            f"{path}: has schema {schema}, this program reads up to {SCHEMA}; update the program"
        )
    migrated = dict(manifest)
    for number in range(schema, SCHEMA):
        migrated = {**_STEPS[number](migrated), "schema": number + 1}
    return migrated


def migrate_table(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """A stored table with the columns of today's `schema`, those added since it was written null.

    Raises:
        StoreError: another column is absent.
    """
    import pyarrow as pa

    for field in schema:
        if field.name in table.column_names:
            continue
        if field.name not in ADDED_COLUMNS:
            raise StoreError(f"{path}: cannot be read: it has no column {field.name}")
        table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)


def _from_1(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Before `--placement` and `--target-devices`: all on CPU, cores as at equal target."""
    fingerprint = dict(manifest.get("fingerprint") or {})
    if placement := fingerprint.get("placement"):
        devices = {"target_devices": ["cpu"], "draft_device": "cpu"}
        fingerprint["placement"] = {"convention": "equal-target", **devices, **placement}
    return {**manifest, "fingerprint": fingerprint}


def _from_2(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Before transfers were told apart from waits: the manifest was the same."""
    return dict(manifest)


_STEPS: Mapping[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}
