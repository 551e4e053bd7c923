"""Metrics of a cell, derived from its rows of the two tables. Definitions: docs/metrics.md.

Times of steps are counted once however many sequences a step advanced; tokens are ids emitted.
What cannot be known (a hit rate without a cache, spans that a decoder does not report) is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness import statistics
from harness.plan import Cell
from harness.spans import CRITICAL

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

CELL_COLUMNS = ["method", "dataset", "temperature", "batch_size", "control"]
_SEQUENCE = ["item", "request_id"]
_SPANS = [*CRITICAL, "speculate_ns"]
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
    """Of the times of a cell, in milliseconds, by linear interpolation."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """How often the token drafted at a position was accepted, given that all before it were.

    Attributes:
        position: from 1.
        rate: accepted over reached.
        reached: rounds that drafted the position and accepted every one before it.
    """

    position: int
    rate: float
    reached: int


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """The figures of one cell.

    Attributes:
        requests: finished requests, each repeat counted.
        tokens: ids emitted.
        tokens_per_s: tokens over the total duration of the steps; prefill is in neither.
        tokens_per_s_per_device: the same over the number of devices that the method owns.
        peak_tokens_per_s: of the quickest step.
        tpot_ms: duration of the steps after the first over the tokens after the first one, per
            request.
        ttft_ms: admission to the end of the step with the first token, per request.
        latency_ms: admission to the end of the step with the last token, per request.
        inter_token_ms: from each token to the next, per token; 0 within a round, whose tokens
            arrive together.
        inter_round_ms: from each round's tokens to the next round's, per round.
        acceptance_length: tokens emitted per verification of one sequence, bonus token included,
            pooled over rounds.
        acceptance_rate: drafted tokens that the target accepted.
        acceptance_by_position: the same by position, each given all before it.
        hit_rate: verification outcomes that the speculation cache held.
        step_ms: mean duration of a step.
        draft_ms: mean time of a step spent drafting on the critical path.
        verify_ms: mean time of a step spent verifying.
        wait_ms: mean time of a step for which the target waited for the draft process.
        transfer_ms: mean time of a step for which it waited for messages and q's on their way; None
            also where the run's schema had that in `wait_ms`.
    """

    requests: int
    tokens: int
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    peak_tokens_per_s: float | None
    tpot_ms: Percentiles
    ttft_ms: Percentiles
    latency_ms: Percentiles
    inter_token_ms: Percentiles
    inter_round_ms: Percentiles
    acceptance_length: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[PositionAcceptance, ...]
    hit_rate: float | None
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    wait_ms: float | None
    transfer_ms: float | None


def split_cells(requests: pd.DataFrame, rounds: pd.DataFrame) -> tuple[CellData, ...]:
    """The tables of a run, cell by cell: by dataset, temperature, batch size, method, control."""
    found = []
    for _, own in requests.groupby(CELL_COLUMNS):
        found.append(CellData(cell_of(own), own, rounds[rounds["item"].isin(own["item"])]))
    return tuple(sorted(found, key=lambda data: _position(data.cell)))


def cell_of(requests: pd.DataFrame) -> Cell:
    """The cell of its requests, which are at least one."""
    first = requests.head(1)
    return Cell(**{field: first[field].tolist()[0] for field in CELL_COLUMNS})


def cell_metrics(data: CellData, devices: int | None) -> CellMetrics:
    """Derives the figures of a cell.

    Args:
        data: its rows.
        devices: number of devices that the method owns; None where the run does not say.
    """
    rounds, steps, arrivals = data.rounds, _steps(data.rounds), _arrivals(data)
    tokens = int(data.requests["output_tokens"].sum())
    rate = _ratio(tokens, steps["duration_ns"].sum() / _S)
    hits, misses = ((rounds["cache"] == outcome).sum() for outcome in ("hit", "miss"))
    reports_spans = bool(steps[_SPANS].sum().any())
    draft, verify, wait, transfer = (
        _mean_ms(steps[kind]) if reports_spans else None for kind in CRITICAL
    )
    return CellMetrics(
        requests=len(data.requests),
        tokens=tokens,
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / devices if rate is not None and devices else None,
        peak_tokens_per_s=_peak(steps),
        tpot_ms=_percentiles(data.requests["tpot_ns"].dropna()),
        ttft_ms=_percentiles(data.requests["ttft_ns"]),
        latency_ms=_percentiles(arrivals.latency_ns),
        inter_token_ms=_percentiles(arrivals.token_gaps_ns),
        inter_round_ms=_percentiles(arrivals.round_gaps_ns),
        acceptance_length=_ratio(rounds["emitted"].sum(), len(rounds)),
        acceptance_rate=_ratio(rounds["accepted"].sum(), rounds["drafted"].sum()),
        acceptance_by_position=acceptance_by_position(rounds),
        hit_rate=_ratio(hits, hits + misses),
        step_ms=_ratio(steps["duration_ns"].sum() / _MS, len(steps)),
        draft_ms=draft,
        verify_ms=verify,
        wait_ms=wait,
        transfer_ms=transfer,
    )


def acceptance_by_position(rounds: pd.DataFrame) -> tuple[PositionAcceptance, ...]:
    """How often each drafted position was accepted, for the positions that were ever reached.

    Args:
        rounds: rows of rounds.parquet.
    """
    drafted, accepted = rounds["drafted"], rounds["accepted"]
    found = []
    for position in range(1, int(drafted.max() if len(rounds) else 0) + 1):
        reached = (drafted >= position) & (accepted >= position - 1)
        if count := int(reached.sum()):
            rate = float((accepted[reached] >= position).mean())
            found.append(PositionAcceptance(position, rate, count))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """When tokens arrived: the times of one cell, in nanoseconds, in no particular order."""

    latency_ns: NDArray[np.float64]
    token_gaps_ns: NDArray[np.float64]
    round_gaps_ns: NDArray[np.float64]


def _arrivals(data: CellData) -> _Arrivals:
    """From the ends of the rounds, as a client sees them: prefills of others fall into gaps."""
    import numpy as np

    rounds = data.rounds.sort_values([*_SEQUENCE, "round"])
    gaps = rounds.groupby(_SEQUENCE)["end_ns"].diff().dropna().to_numpy(np.float64)
    together = int((rounds["emitted"] - 1).sum())  # tokens that came with the one before them
    ends = rounds.groupby(_SEQUENCE)["end_ns"].agg(["first", "last"])
    table = data.requests.join(ends, on=_SEQUENCE)
    latency = (table["ttft_ns"] + table["last"] - table["first"]).to_numpy(np.float64)
    return _Arrivals(latency, np.concatenate([gaps, np.zeros(together)]), gaps)


def _position(cell: Cell) -> tuple[str, float, int, str, bool]:
    return cell.dataset, cell.temperature, cell.batch_size, cell.method, cell.control


def _steps(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row for each step: its duration, its tokens and the spans that its sequences shared."""
    durations = rounds.assign(duration_ns=rounds["end_ns"] - rounds["start_ns"])
    grouped = durations.groupby(["item", "step"])
    return grouped[["duration_ns", *_SPANS]].max().assign(tokens=grouped["emitted"].sum())


def _peak(steps: pd.DataFrame) -> float | None:
    if steps.empty:
        return None
    return float((steps["tokens"] / (steps["duration_ns"] / _S)).max())


def _percentiles(times_ns: ArrayLike) -> Percentiles:
    import numpy as np

    times_ms = np.asarray(times_ns, dtype=np.float64) / _MS
    return Percentiles(*statistics.quantiles(times_ms, (0.5, 0.9, 0.95, 0.99)))


def _mean_ms(times_ns: pd.Series[float]) -> float | None:
    """None where none of the times is told."""
    return float(times_ns.mean() / _MS) if times_ns.notna().any() else None


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
