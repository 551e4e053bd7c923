"""A run's summary as the rows and sentences that `harness show` prints and `--markdown` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

COLUMNS = (
    "method",
    "lossless",
    "tok/s",
    "/device",
    "TPOT ms",
    "TTFT ms",
    "length",
    "accepted",
    "hits",
    "over ar",
    "over sd",
)
TEXTS = ("method", "lossless", "ms")  # columns that are set left
QUANTILES = ("p50", "p90", "p95", "p99")
_TIMES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "inter_token_ms": "between tokens",
    "inter_round_ms": "between rounds",
    "latency_ms": "end to end",
}
LOSSLESS = {True: "yes", False: "NO", None: "unverified"}


class Group(NamedTuple):
    """The cells that are compared with each other, under one title."""

    title: str
    cells: tuple[Mapping[str, Any], ...]


def groups(summary: Mapping[str, Any]) -> Iterator[Group]:
    """The cells by dataset, temperature and batch size.

    Args:
        summary: of `harness.summary.summarise`.
    """
    for (dataset, temperature, batch), found in groupby(summary["cells"], key=_group):
        cells = tuple(found)
        placement = f"{cells[0]['placement']} placement"
        if emulated := cells[0]["emulated"]:
            placement += f", EMULATED {emulated}"
        title = f"{dataset}, temperature {temperature:g}, batch size {batch}, {placement}"
        yield Group(title, cells)


def energy_line(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line for the whole run: most machines tell nothing."""
    from harness.energy import EMULATED, UNKNOWN

    known = [cell for cell in cells if cell["energy"]]
    if not known:
        return EMULATED if any(cell["emulated"] for cell in cells) else UNKNOWN
    sources = dict.fromkeys(name for cell in known for name in cell["energy"]["sources"])
    return f"energy of {', '.join(sources)}, idle power and prefill included"


def _group(cell: Mapping[str, Any]) -> tuple[str, float, int]:
    return cell["dataset"], cell["temperature"], cell["batch_size"]


def notes(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of speedups and their factors, predicted speeds, energy and measured contention."""
    from harness.contention import Contention

    for cell in cells:
        for baseline, ratio in cell["speedup"].items():
            if ratio["value"] is not None:
                yield f"{_label(cell)} over {baseline}: {_factors(ratio)}"
    for cell in cells:
        if found := cell["prediction"]:
            yield f"{cell['method']}: {_prediction(found)}"
    for cell in cells:
        if energy := cell["energy"]:
            told = f"{energy['joules_per_token']:.3g} J/token, {energy['watts']:.1f} W"
            yield f"{_label(cell)}: {told}"
    for cell in cells:
        if slowdown := cell["contention"]:
            yield f"{cell['method']}: {Contention(**slowdown).sentence}"


def _factors(ratio: Mapping[str, float]) -> str:
    return (
        f"{ratio['value']:.3f} = {ratio['tokens_per_round']:.3f} in tokens a round x "
        f"{ratio['time_per_round']:.3f} in speed of a round; "
        f"geometric mean of prompts {ratio['geometric_mean']:.3f}"
    )


def latency_rows(cell: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each kind of latency, under method, kind and `QUANTILES`."""
    for name, told in _TIMES.items():
        yield _label(cell), told, *(_number(cell[name][quantile], 2) for quantile in QUANTILES)


def acceptance_line(cell: Mapping[str, Any]) -> str | None:
    """P(accept k | k - 1 accepted) for k = 1, 2, ..."""
    rates = [_percent(at["rate"]) for at in cell["acceptance_by_position"]]
    return f"{_label(cell)}: accepted by position {' '.join(rates)}" if rates else None


def _prediction(found: Mapping[str, Any]) -> str:
    return (
        f"predicted {_number(found['predicted_tokens_per_s'])} tok/s, measured "
        f"{_number(found['measured_tokens_per_s'])}, efficiency {_number(found['efficiency'], 2)} "
        f"(h {_number(found['hit_rate'], 2)}, {_number(found['expected_hit_rate'], 2)} expected, "
        f"E {_number(found['tokens_on_hit'], 2)} on hits and "
        f"{_number(found['tokens_on_miss'], 2)} on misses, T_v {_number(found['verify_ms'])} ms, "
        f"T_p {_number(found['build_time'], 2)}, T_b {_number(found['backup_time'], 2)}; "
        f"hits waited {_percent(found['wait_on_hit'])} of T_v)"
    )


def row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """A cell under `COLUMNS`."""
    marks = " (untuned)" if cell["untuned"] else " (automatic)" if cell["automatic"] else ""
    marks += " (degraded)" if cell["degraded"] else ""
    return (
        _label(cell) + marks,
        LOSSLESS[cell["verified"]],
        _number(cell["tokens_per_s"]),
        _number(cell["tokens_per_s_per_device"]),
        _number(cell["tpot_ms"]["p50"]),
        _number(cell["ttft_ms"]["p50"]),
        _number(cell["acceptance_length"], 2),
        _percent(cell["acceptance_rate"]),
        _percent(cell["hit_rate"]),
        _speedup(cell["speedup"].get("ar")),
        _speedup(cell["speedup"].get("sd")),
    )


def _label(cell: Mapping[str, Any]) -> str:
    return f"{cell['method']}@control" if cell["control"] else str(cell["method"])


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _speedup(estimate: Mapping[str, float | None] | None) -> str:
    """The ratio with its 95% interval."""
    if estimate is None or estimate["value"] is None:
        return "-"
    value = f"{estimate['value']:.2f}"
    if estimate["low"] is None or estimate["high"] is None:
        return value
    return f"{value} [{estimate['low']:.2f}, {estimate['high']:.2f}]"
