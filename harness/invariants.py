"""What must hold in the rows of every run, whatever was measured. A broken one is a bug.

Each function yields a line for every fault that it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from harness.decoder import SpanKind
from harness.metrics import CellData, CellMetrics, cell_metrics
from harness.spans import CRITICAL

if TYPE_CHECKING:
    import pandas as pd

_UNTOLD = 0.01  # share of a step that its spans may leave out, or count twice ...
_BOOKKEEPING_NS = 1_000_000  # ... and what a step may always leave out
_ROUNDING = 1 + 1e-9


def faults(requests: pd.DataFrame, rounds: pd.DataFrame, cells: Sequence[CellData]) -> list[str]:
    """Every invariant that a run breaks: tokens, rounds, spans and the figures of its cells."""
    return [
        *token_faults(requests, rounds),
        *round_faults(rounds),
        *span_faults(rounds),
        *chain.from_iterable(
            metric_faults(data.cell.id, cell_metrics(data, devices=None)) for data in cells
        ),
    ]


def token_faults(requests: pd.DataFrame, rounds: pd.DataFrame) -> Iterable[str]:
    """The tokens emitted in a request's rounds are its output."""
    key = ["item", "request_id"]
    emitted = rounds.groupby(key, as_index=False)["emitted"].sum()
    outputs = requests[[*key, "output_tokens"]].assign(length=requests["output_ids"].map(len))
    table = outputs.merge(emitted, on=key, how="left").fillna({"emitted": 0})
    wrong = table[
        ~(table["emitted"].eq(table["output_tokens"]) & table["emitted"].eq(table["length"]))
    ]
    for row in wrong.to_dict("records"):
        yield (
            f"{row['item']} {row['request_id']} emitted {row['emitted']:.0f} tokens in its rounds, "
            f"its output has {row['output_tokens']}"
        )


def round_faults(rounds: pd.DataFrame) -> Iterable[str]:
    """No more is accepted than drafted; spans lie in their step, but for speculation beside it."""
    columns = ["item", "request_id", "round", "start_ns", "end_ns", "drafted", "accepted", "spans"]
    for row in rounds[columns].to_dict("records"):
        where = f"{row['item']} {row['request_id']} round {row['round']}"
        if not 0 <= row["accepted"] <= row["drafted"]:
            yield f"{where} accepted {row['accepted']} of {row['drafted']} drafted tokens"
        for span in row["spans"]:
            beside = span["kind"] == SpanKind.SPECULATE
            inside = row["start_ns"] <= span["start_ns"] <= span["end_ns"] <= row["end_ns"]
            if not (beside or inside):
                yield f"{where} has a {span['kind']} span outside its step"


def span_faults(rounds: pd.DataFrame) -> Iterable[str]:
    """Drafting, verifying, waiting and transfers add up to the time of the steps within 1%.

    More in any step means that time was told twice. Less is judged by an item's median step, which
    one interruption between two spans does not move, and may be up to a millisecond of bookkeeping.
    Items of decoders that report no spans are left out.
    """
    steps = rounds.drop_duplicates(["item", "step"])
    wall, told = steps["end_ns"] - steps["start_ns"], steps[CRITICAL].sum(axis=1)
    table = steps[["item", "step"]].assign(wall=wall, told=told, untold=wall - told)
    for row in table[table["told"] > (1 + _UNTOLD) * table["wall"]].to_dict("records"):
        yield (
            f"{row['item']} step {row['step']} has spans of {row['told'] / 1e6:.3f} ms in "
            f"{row['wall'] / 1e6:.3f} ms"
        )
    for item, own in table.groupby("item"):
        median, untold = own["wall"].median(), own["untold"].median()
        if own["told"].any() and untold > max(_UNTOLD * median, _BOOKKEEPING_NS):
            yield (
                f"{item} has no span for {untold / 1e6:.3f} ms of its median step of "
                f"{median / 1e6:.3f} ms"
            )


def metric_faults(cell: str, metrics: CellMetrics) -> Iterable[str]:
    """A peak is at least the mean, and no rate is above 1."""
    peak, mean = metrics.peak_tokens_per_s, metrics.tokens_per_s
    if peak is not None and mean is not None and peak * _ROUNDING < mean:
        yield f"{cell}: the quickest step makes {peak:.1f} tokens/s, the mean is {mean:.1f}"
    rates = {"acceptance": metrics.acceptance_rate, "hit": metrics.hit_rate} | {
        f"acceptance at position {found.position}": found.rate
        for found in metrics.acceptance_by_position
    }
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate <= 1:
            yield f"{cell}: the {name} rate is {rate:.3f}"
