"""The table of cells: few digits, one form everywhere, never a NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from harness.speedup import Speedup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.metrics import Percentiles
    from harness.statistics import Estimate
    from reports.colours import MethodStyle
    from reports.results import CellResult


class Value(NamedTuple):
    """A table entry: a number and, smaller below it, its interval or percentile."""

    main: str
    detail: str = ""


Values = tuple[Value | None, ...]


class Certificate(NamedTuple):
    """What is known of a method's losslessness, and how it is shown."""

    badge: str
    words: str


_CERTIFICATES = {
    True: Certificate("pass", "lossless"),
    False: Certificate("fail", "NOT lossless"),
    None: Certificate("skipped", "unverified"),
}


@dataclass(frozen=True)
class Row:
    """One cell of the benchmark as it is shown."""

    variable: str
    method: str
    certificate: Certificate
    dataset: str
    temperature: str
    batch_size: int
    values: Values
    opens_group: bool


COLUMNS = (
    Value("tokens/s"),
    Value("tokens/s", "per device"),
    Value("speedup", "over AR"),
    Value("speedup", "over SD"),
    Value("tokens", "a round"),
    Value("acceptance", "rate"),
    Value("cache", "hit rate"),
    Value("TTFT", "ms"),
    Value("TPOT", "ms"),
)

PARTS_COLUMNS = (
    Value("TTFT", "ms"),
    Value("TPOT", "ms"),
    Value("between tokens", "ms"),
    Value("between rounds", "ms"),
    Value("end to end", "ms"),
    Value("tokens a round", "over AR"),
    Value("speed of a round", "over AR"),
    Value("geometric mean", "of speedups over AR"),
    Value("energy", "joules a token"),
)


def table_rows(cells: Sequence[CellResult], styles: Mapping[str, MethodStyle]) -> list[Row]:
    """The figures of each cell under `COLUMNS`."""
    return _rows(cells, styles, _values)


def parts_rows(cells: Sequence[CellResult], styles: Mapping[str, MethodStyle]) -> list[Row]:
    """Percentiles of each cell's latencies and the parts of its speedup, under `PARTS_COLUMNS`."""
    return _rows(cells, styles, _parts)


def _rows(
    cells: Sequence[CellResult],
    styles: Mapping[str, MethodStyle],
    values: Callable[[CellResult], Values],
) -> list[Row]:
    """Rows in the order given; a rule opens each new dataset, temperature or batch size."""
    rows: list[Row] = []
    previous = None
    for cell in cells:
        group = (cell.dataset, cell.temperature, cell.batch_size)
        rows.append(
            Row(
                variable=styles[cell.method].variable,
                method=_label(cell),
                certificate=_CERTIFICATES[cell.verified],
                dataset=cell.dataset,
                temperature=f"{cell.temperature:g}",
                batch_size=cell.batch_size,
                values=values(cell),
                opens_group=group != previous,
            )
        )
        previous = group
    return rows


def _label(cell: CellResult) -> str:
    marks = (
        (cell.control, "A/A"),
        (cell.degraded, "degraded"),
        (cell.untuned, "untuned"),
        (cell.automatic, "automatic"),
    )
    return cell.method + "".join(f" ({mark})" for applies, mark in marks if applies)


def _values(cell: CellResult) -> Values:
    return (
        _number(cell.tokens_per_s, 1),
        _number(cell.tokens_per_s_per_device, 1),
        _speedup(cell.speedup.get("ar")),
        _speedup(cell.speedup.get("sd")),
        _number(cell.acceptance_length, 2),
        _number(cell.acceptance_rate, 3),
        _number(cell.hit_rate, 3),
        _percentiles(cell.ttft_ms),
        _percentiles(cell.tpot_ms),
    )


def _parts(cell: CellResult) -> Values:
    times = (cell.ttft_ms, cell.tpot_ms, cell.inter_token_ms, cell.inter_round_ms, cell.latency_ms)
    over = cell.speedup.get("ar") or Speedup(None, None, None, 0)
    factors = (over.tokens_per_round, over.time_per_round, over.geometric_mean)
    energy = cell.energy.joules_per_token if cell.energy else None
    return (*map(_quantiles, times), *(_number(figure, 2) for figure in (*factors, energy)))


def _quantiles(times: Percentiles) -> Value | None:
    """The median, and below it the three higher ones."""
    if not present(times.p50):
        return None
    higher = (times.p90, times.p95, times.p99)
    return Value(f"{times.p50:,.1f}", " · ".join(f"{t:,.1f}" for t in higher if present(t)))


def present(number: float | None) -> TypeGuard[float]:
    """Whether there is a number that can be shown."""
    return number is not None and math.isfinite(number)


def _number(number: float | None, digits: int) -> Value | None:
    return Value(f"{number:,.{digits}f}") if present(number) else None


def _speedup(estimate: Estimate | None) -> Value | None:
    if estimate is None or not present(estimate.value):
        return None
    value, _, interval = interval_text(estimate).partition(" ")
    return Value(f"{value}x", interval)


def interval_text(estimate: Estimate) -> str:
    """Such as `1.72 [1.65, 1.79]`; the value alone where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _percentiles(times: Percentiles) -> Value | None:
    if not present(times.p50):
        return None
    return Value(f"{times.p50:,.1f}", f"{times.p95:,.1f}" if present(times.p95) else "")
