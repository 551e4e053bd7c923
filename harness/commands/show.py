"""`harness show`: the figures of a stored run, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
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
_TEXTS = ("method", "lossless", "ms")
_QUANTILES = ("p50", "p90", "p95", "p99")
_TIMES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "inter_token_ms": "between tokens",
    "inter_round_ms": "between rounds",
    "latency_ms": "end to end",
}
_LOSSLESS = {True: "yes", False: "NO", None: "unverified"}
_WIDTH = 132  # columns that the table takes; a narrower terminal wraps it, nothing is cut


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@click.option(
    "--latency", is_flag=True, help="Also percentiles of latency and acceptance by position."
)
def show(run: Path, as_json: bool, latency: bool) -> None:
    """Show the results, checks and warnings of a run directory."""
    from harness.store import read_run, to_json
    from harness.summary import summarise

    if as_json:
        click.echo(to_json(summarise(read_run(run))))
    else:
        print_run(run, latency=latency)


def print_run(run: Path, *, latency: bool = False) -> None:
    """Prints a table for each dataset, temperature and batch size, then checks and warnings.

    Below a table: what each speedup is made of, each cell's predicted speed beside the measured
    one, its energy and its contention. `latency` adds a table of percentiles and acceptance by
    position.
    """
    from rich.console import Console

    from harness.store import read_run
    from harness.summary import summarise

    summary = summarise(read_run(run))
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    for (dataset, temperature, batch), group in groupby(summary["cells"], key=_group):
        cells = list(group)
        placement = f"{cells[0]['placement']} placement"
        if emulated := cells[0]["emulated"]:
            placement += f", EMULATED {emulated}"
        title = f"{dataset}, temperature {temperature:g}, batch size {batch}, {placement}"
        console.print(_table(title, _COLUMNS, map(_row, cells)))
        if latency:
            rows = (row for cell in cells for row in _latency_rows(cell))
            console.print(_table("latency", ("method", "ms", *_QUANTILES), rows))
            for line in filter(None, map(_acceptance, cells)):
                console.print(line, markup=False)
        for line in _notes(cells):
            console.print(line, markup=False)
    console.print(_energy(summary["cells"]), markup=False)
    for check in summary["checks"]:
        console.print(f"{check['status']:4}  {check['name']}: {check['detail']}", markup=False)
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", markup=False)


def _energy(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line for the whole run: most machines tell nothing."""
    from harness.energy import UNKNOWN

    known = [cell for cell in cells if cell["energy"]]
    if not known:
        return UNKNOWN
    sources = dict.fromkeys(name for cell in known for name in cell["energy"]["sources"])
    return f"energy of {', '.join(sources)}, idle power and prefill included"


def _group(cell: Mapping[str, Any]) -> tuple[str, float, int]:
    return cell["dataset"], cell["temperature"], cell["batch_size"]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _notes(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
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


def _latency_rows(cell: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, told in _TIMES.items():
        yield _label(cell), told, *(_number(cell[name][quantile], 2) for quantile in _QUANTILES)


def _acceptance(cell: Mapping[str, Any]) -> str | None:
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


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    marks = " (untuned)" if cell["untuned"] else ""
    marks += " (degraded)" if cell["degraded"] else ""
    return (
        _label(cell) + marks,
        _LOSSLESS[cell["verified"]],
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
