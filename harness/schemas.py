"""Columns of the two tables of a run directory; their meaning: docs/run-directory.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def requests_schema() -> pa.Schema:
    """Of requests.parquet."""
    import pyarrow as pa

    return pa.schema(
        {
            "item": pa.string(),
            "method": pa.string(),
            "dataset": pa.string(),
            "category": pa.string(),
            "control": pa.bool_(),
            "temperature": pa.float64(),
            "batch_size": pa.int64(),
            "repeat": pa.int64(),
            "block": pa.int64(),
            "request_id": pa.string(),
            "prompt_index": pa.int64(),
            "prompt_tokens": pa.int64(),
            "output_tokens": pa.int64(),
            "output_ids": pa.list_(pa.int32()),
            "finish": pa.string(),
            "prefill_ns": pa.int64(),
            "ttft_ns": pa.int64(),
            "decode_ns": pa.int64(),
            "tpot_ns": pa.float64(),
        }
    )


def rounds_schema() -> pa.Schema:
    """Of rounds.parquet."""
    import pyarrow as pa

    span = pa.struct({"kind": pa.string(), "start_ns": pa.int64(), "end_ns": pa.int64()})
    return pa.schema(
        {
            "item": pa.string(),
            "request_id": pa.string(),
            "step": pa.int64(),
            "round": pa.int64(),
            "start_ns": pa.int64(),
            "end_ns": pa.int64(),
            "live": pa.int64(),
            "emitted": pa.int64(),
            "drafted": pa.int64(),
            "accepted": pa.int64(),
            "cache": pa.string(),
            "backup": pa.string(),
            "guesses": pa.float64(),
            "hit_chance": pa.float64(),
            "rank": pa.float64(),
            "draft_ns": pa.int64(),
            "verify_ns": pa.int64(),
            "wait_ns": pa.int64(),
            "transfer_ns": pa.float64(),
            "speculate_ns": pa.int64(),
            "spans": pa.list_(span),
        }
    )
