"""Times of the spans of rounds.parquet, also of runs that told fewer kinds of them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.decoder import SpanKind

if TYPE_CHECKING:
    import pandas as pd

CRITICAL = ["draft_ns", "verify_ns", "wait_ns", "transfer_ns"]  # these take turns in a step


def waited_ns(rows: pd.DataFrame) -> pd.Series[float]:
    """How long the target was idle for its draft process, with messages and q's on their way.

    Telling the draft the outcome behind a verification is a transfer, and no wait.

    Args:
        rows: of rounds.parquet; before schema 3 all of it was in `wait_ns`.
    """
    telling = [_behind_verification(spans) for spans in rows["spans"]]
    waited: pd.Series[float] = rows["wait_ns"] + rows["transfer_ns"].fillna(0.0) - telling
    return waited


def _behind_verification(spans: Sequence[Mapping[str, Any]]) -> int:
    """Duration of the transfer that ends a step; every other one has a verification behind it."""
    last = spans[-1] if len(spans) else None
    if last is None or last["kind"] != SpanKind.TRANSFER:
        return 0
    return int(last["end_ns"] - last["start_ns"])
