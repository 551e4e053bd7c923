"""Times of the spans of rounds.parquet, also of runs that told fewer kinds of them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

CRITICAL = ["draft_ns", "verify_ns", "wait_ns", "transfer_ns"]  # these take turns in a step


def waited_ns(rows: pd.DataFrame) -> pd.Series[float]:
    """How long the target was idle for its draft process, with messages and q's on their way.

    Args:
        rows: of rounds.parquet, or steps; before schema 3 all of it was in `wait_ns`.
    """
    waited: pd.Series[float] = rows["wait_ns"] + rows["transfer_ns"].fillna(0.0)
    return waited
