"""`harness.spans` on rows written down by hand."""

from __future__ import annotations

import pandas as pd

from harness.spans import waited_ns


def row(*spans: tuple[str, int, int], transfer: float | None) -> dict[str, object]:
    wait = sum(end - start for kind, start, end in spans if kind == "wait")
    told = [{"kind": kind, "start_ns": start, "end_ns": end} for kind, start, end in spans]
    return {"wait_ns": wait, "transfer_ns": transfer, "spans": told}


def test_a_wait_has_the_transfers_before_verifications_and_not_the_one_that_tells_the_outcome():
    before, between, behind = ("transfer", 5, 9), ("transfer", 20, 22), ("transfer", 30, 37)
    wait, first, second = ("wait", 0, 5), ("verify", 9, 20), ("verify", 22, 30)
    rows = pd.DataFrame(
        [
            row(wait, before, first, transfer=4),
            row(wait, before, first, between, second, transfer=6),
            row(wait, before, first, between, second, behind, transfer=13),
            row(("wait", 0, 9), first, transfer=None),  # before schema 3
            row(transfer=0),  # a decoder that tells nothing
        ]
    )
    assert waited_ns(rows).tolist() == [9, 11, 11, 9, 0]
