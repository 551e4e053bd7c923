"""Metrics of a cell, derived from its rows of the two tables. Definitions: docs/run-directory.md.

Times of steps are counted once however many sequences a step advanced; tokens are ids emitted.
What cannot be known (a hit rate without a cache, spans that a decoder does not report) is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness import statistics
from harness.plan import Cell
from harness.statistics import Estimate

if TYPE_CHECKING:
    import pandas as pd

_CELL = ["method", "dataset", "temperature", "batch_size", "control"]
_SPANS = ["draft_ns", "verify_ns", "wait_ns", "speculate_ns"]
_MS = 1e6  # nanoseconds
_S = 1e9


@dataclass(frozen=True, slots=True)
class CellData:
    """The rows of one cell, all repeats and blocks."""

    cell: Cell
    requests: pd.DataFrame
    rounds: pd.DataFrame

    def only(self, category: str) -> CellData:
        """The same cell on the prompts of one category."""
        requests = self.requests[self.requests["category"] == category]
        rounds = self.rounds[self.rounds["request_id"].isin(requests["request_id"])]
        return CellData(self.cell, requests, rounds)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Over the requests of a cell, in milliseconds."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """The figures of one cell.

    Attributes:
        requests: finished requests, each repeat counted.
        tokens: ids emitted.
        tokens_per_s: tokens over the total duration of the steps; prefill is in neither.
        tokens_per_s_per_device: the same over the number of devices that the method owns.
        tpot_ms: duration of the steps after the first over the tokens after the first one, per
            request.
        ttft_ms: time to first token, per request.
        acceptance_length: tokens emitted per verification of one sequence, bonus token included,
            pooled over rounds.
        acceptance_rate: drafted tokens that the target accepted.
        hit_rate: verification outcomes that the speculation cache held.
        draft_ms: mean time of a step spent drafting on the critical path.
        verify_ms: mean time of a step spent verifying.
        wait_ms: mean time of a step for which the target waited for the draft process.
    """

    requests: int
    tokens: int
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    tpot_ms: Percentiles
    ttft_ms: Percentiles
    acceptance_length: float | None
    acceptance_rate: float | None
    hit_rate: float | None
    draft_ms: float | None
    verify_ms: float | None
    wait_ms: float | None


def split_cells(requests: pd.DataFrame, rounds: pd.DataFrame) -> tuple[CellData, ...]:
    """The tables of a run, cell by cell: by dataset, temperature, batch size, method, control."""
    found = []
    for _, own in requests.groupby(_CELL):
        first = own[_CELL].to_dict("records")[0]
        cell = Cell(**{str(field): value for field, value in first.items()})
        found.append(CellData(cell, own, rounds[rounds["item"].isin(own["item"])]))
    return tuple(sorted(found, key=lambda data: _position(data.cell)))


def cell_metrics(data: CellData, devices: int | None) -> CellMetrics:
    """Derives the figures of a cell.

    Args:
        data: its rows.
        devices: number of devices that the method owns; None where the run does not say.
    """
    rounds, steps = data.rounds, _steps(data.rounds)
    tokens = int(data.requests["output_tokens"].sum())
    rate = _ratio(tokens, steps["duration_ns"].sum() / _S)
    hits, misses = ((rounds["cache"] == outcome).sum() for outcome in ("hit", "miss"))
    reports_spans = bool(steps[_SPANS].to_numpy().any())
    draft, verify, wait = (
        float(steps[kind].mean() / _MS) if reports_spans else None for kind in _SPANS[:3]
    )
    return CellMetrics(
        requests=len(data.requests),
        tokens=tokens,
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / devices if rate is not None and devices else None,
        tpot_ms=_percentiles(data.requests["tpot_ns"]),
        ttft_ms=_percentiles(data.requests["ttft_ns"]),
        acceptance_length=_ratio(rounds["emitted"].sum(), len(rounds)),
        acceptance_rate=_ratio(rounds["accepted"].sum(), rounds["drafted"].sum()),
        hit_rate=_ratio(hits, hits + misses),
        draft_ms=draft,
        verify_ms=verify,
        wait_ms=wait,
    )


def speedup(method: CellData, baseline: CellData) -> Estimate:
    """Speedup of a cell over a baseline's, over the requests that both finished.

    A request's time is its share of the steps: each step's duration divided evenly among the
    sequences that it advanced. The shares of a cell add up to the duration of its steps, so over
    all prompts the speedup is the ratio of the two throughputs. Repeats of a prompt are one
    observation: the interval is over prompts.
    """
    key = ["prompt_index", "request_id"]
    both = _costs(baseline).merge(_costs(method), on=key, suffixes=("_baseline", ""))
    prompts = both.drop(columns="request_id").groupby("prompt_index").sum()
    return statistics.speedup(
        prompts["share_ns_baseline"],
        prompts["output_tokens_baseline"],
        prompts["share_ns"],
        prompts["output_tokens"],
    )


def _position(cell: Cell) -> tuple[str, float, int, str, bool]:
    return cell.dataset, cell.temperature, cell.batch_size, cell.method, cell.control


def _steps(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row for each step: its duration and the spans that its sequences shared."""
    durations = rounds.assign(duration_ns=rounds["end_ns"] - rounds["start_ns"])
    return durations.groupby(["item", "step"])[["duration_ns", *_SPANS]].max()


def _costs(data: CellData) -> pd.DataFrame:
    """`prompt_index`, `request_id`, `output_tokens` and `share_ns` of each request."""
    key = ["item", "request_id"]
    shares = (data.rounds["end_ns"] - data.rounds["start_ns"]) / data.rounds["live"]
    total = data.rounds[key].assign(share_ns=shares).groupby(key).sum()
    rows = data.requests[[*key, "prompt_index", "output_tokens"]].join(total, on=key)
    return rows.drop(columns="item")


def _percentiles(times_ns: pd.Series[float]) -> Percentiles:
    return Percentiles(*statistics.quantiles(times_ns.dropna() / _MS, (0.5, 0.95)))


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
