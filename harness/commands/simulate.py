"""`harness simulate`: what the methods would give on hardware that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands.run import PATH, comma_list
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.simulation.acceptance import Acceptance
    from harness.simulation.scenario import Simulated
    from harness.simulation.traces import Trace

_POSITIVE = click.IntRange(min=1)
_COLUMNS = (
    "method", "K", "tok/s", "/user", "/device", "length", "hits", "stalls", "ms a round", "over ar",
)  # fmt: skip
_TEXTS = ("pair", "method", "run", "cell")
_WIDTH = 132  # columns; a narrower terminal wraps the table, nothing is cut
_TITLE = "SIMULATED, not measured"


@click.command()
@click.option("--preset", type=click.Choice(["paper"]), help="The SSD paper's own speeds, checked.")
@click.option(
    "--against", type=PATH, multiple=True, metavar="RUN", help="Replay a run's cells: is it right?"
)
@click.option("--figures", type=PATH, metavar="DIR", help="Answer questions, a chart (SVG) each.")
@click.option("--profile", help="Hardware: a profile's name or file (see harness profile).")
@click.option(
    "--acceptance", default="0.8", show_default=True, help="Rate, or one for each position: 0.9,0.8"
)
@click.option("--trace", type=PATH, metavar="RUN", help="Replay a run's rounds instead.")
@click.option("--trace-method", default="ssd", show_default=True, help="Whose rounds of it.")
@click.option("--methods", type=comma_list, default="ar,sd,tree,amusd,pearl,ssd", show_default=True)
@click.option("--lookahead", type=_POSITIVE, help="K of every method; each one's best by default.")
@click.option("--batch-size", type=_POSITIVE, default=1, show_default=True)
@click.option("--budget", type=click.IntRange(min=0), default=24, show_default=True)
@click.option("--fan-out", type=click.Choice(["geometric", "uniform"]), default="geometric")
@click.option("--fallback", type=click.Choice(["neural", "fast", "adaptive"]), default="neural")
@click.option("--exponent", type=float, default=1.2, show_default=True, help="r of the misses.")
@click.option("--width", type=_POSITIVE, default=3, show_default=True, help="Of the tree.")
@click.option("--context", type=_POSITIVE, default=512, show_default=True, help="Mean tokens.")
@click.option("--output-tokens", type=_POSITIVE, default=512, show_default=True)
@click.option("--rounds", type=_POSITIVE, default=10_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
def simulate(
    preset: str | None,
    against: tuple[Path, ...],
    figures: Path | None,
    profile: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Simulate the methods on a hardware profile. Nothing here is a measurement."""
    if sum(map(bool, (preset, against, figures, profile))) != 1:
        raise UsageError(
            "--profile: give this, --preset paper, --against RUN or --figures DIR, and only one"
        )
    if preset is not None:
        _paper(as_json)
    elif against:
        _against(against, as_json)
    elif figures is not None:
        _figures(figures)
    elif profile is not None:
        _scenarios(profile, as_json, given)


def _figures(folder: Path) -> None:
    from harness.simulation.questions import answers
    from reports.simulation import write_figures

    answered = answers()
    for answer, path in zip(answered, write_figures(answered, folder), strict=True):
        click.echo(f"{path}: {answer.title} (simulated)\n  {answer.finding}")


def _against(runs: Sequence[Path], as_json: bool) -> None:
    from dataclasses import asdict

    from harness.simulation.validation import REPLAYED, median_error, median_errors, validate
    from harness.store import to_json

    replays = [replay for run in runs for replay in validate(run)]
    if not replays:
        raise UsageError(
            "--against: the runs have no cell of two steps of a method replayed here "
            f"({', '.join(REPLAYED)})"
        )
    error, by_method = median_error(replays), median_errors(replays)
    if as_json:
        rows = [asdict(replay) | {"error": replay.error} for replay in replays]
        click.echo(to_json({"rows": rows, "median_error": error, "by_method": by_method}))
        return
    head = ("run", "cell", "rounds", "measured tok/s", "simulated tok/s", "halves", "error")
    lines = [
        (
            r.run, r.cell, str(r.rounds), f"{r.measured:.1f}", f"{r.simulated:.1f}",
            " ".join(f"{one:+.1%}" for one in r.differences), f"{r.error:.1%}",
        )
        for r in replays
    ]  # fmt: skip
    _print(f"stored runs, and the same rounds simulated ({_TITLE})", head, lines)
    told = ", ".join(f"{method} {one:.1%}" for method, one in by_method.items())
    click.echo(f"median error: {error:.1%} of {len(replays)} cells ({told})")


def _paper(as_json: bool) -> None:
    from harness.simulation.paper import assumptions, paper
    from harness.store import to_json

    compared = paper()
    columns = ("pair", "method", "published", "simulated", "difference", "lookahead", "label")
    rows = [{name: getattr(each, name) for name in columns} for each in compared]
    if as_json:
        click.echo(to_json({"rows": rows, "assumptions": assumptions()}))
        return
    head = ("pair", "method", "published tok/s", "simulated tok/s", "difference", "K")
    lines = [
        (
            c.pair, c.method, f"{c.published:.1f}", f"{c.simulated:.1f}",
            f"{c.difference:+.0%}", "-" if c.lookahead is None else str(c.lookahead),
        )
        for c in compared
    ]  # fmt: skip
    _print(f"the SSD paper's speeds, batch 1 ({_TITLE})", head, lines)
    for name, value in assumptions().items():
        click.echo(f"assumed: {name}: {value}")


def _scenarios(profile: str, as_json: bool, given: dict[str, Any]) -> None:
    from harness.simulation.profile import load_profile
    from harness.simulation.scenario import Scenario
    from harness.simulation.simulate import LOOKAHEADS, fastest
    from harness.store import to_json

    hardware, assumed = load_profile(profile), {"profile": profile, **given}
    names = ("rounds", "seed", "methods", "lookahead")
    rounds, seed, methods, lookahead = (given.pop(name) for name in names)
    acceptance = _acceptance(given)
    scenarios = [Scenario(method, hardware, acceptance, **given) for method in methods]
    tried = LOOKAHEADS if lookahead is None else (lookahead,)
    results = [fastest(scenario, rounds, seed, tried) for scenario in scenarios]
    if as_json:
        shown = {name: str(v) if isinstance(v, Path) else v for name, v in assumed.items()}
        rows = [_row(found) for found in results]
        click.echo(to_json({"rows": rows, "assumptions": {**shown, "kind": hardware.kind}}))
        return
    base = next((r.tokens_per_s for r in results if r.scenario.method == "ar"), None)
    _print(f"{hardware.name} ({_TITLE})", _COLUMNS, [_line(found, base) for found in results])


def _acceptance(given: dict[str, Any]) -> Acceptance | Trace:
    """The process that `--trace` or `--acceptance` and `--exponent` name, taken out of `given`."""
    from harness.simulation.acceptance import Acceptance
    from harness.simulation.traces import read_trace

    names = ("trace", "trace_method", "acceptance", "exponent")
    trace, method, rates, exponent = (given.pop(name) for name in names)
    if trace is not None:
        return read_trace(trace, method)
    try:
        return Acceptance(tuple(float(rate) for rate in rates.split(",")), exponent)
    except ValueError:
        raise UsageError(f"--acceptance {rates}: must be numbers, e.g. 0.8 or 0.9,0.8") from None


def _row(found: Simulated) -> dict[str, Any]:
    return {
        "label": found.label,
        "method": found.scenario.method,
        "lookahead": found.scenario.drafted or None,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_user": found.tokens_per_s_per_user,
        "tokens_per_s_per_device": found.tokens_per_s_per_device,
        "acceptance_length": found.acceptance_length,
        "hit_rate": found.hit_rate,
        "stall_rate": found.stall_rate,
        "round_ms": found.round_ms,
    }


def _line(found: Simulated, base: float | None) -> tuple[str, ...]:
    hits = "-" if found.hit_rate is None else f"{found.hit_rate:.0%}"
    over = "-" if base is None else f"{found.tokens_per_s / base:.2f}"
    return (
        found.scenario.method,
        str(found.scenario.drafted or "-"),
        f"{found.tokens_per_s:.1f}",
        f"{found.tokens_per_s_per_user:.1f}",
        f"{found.tokens_per_s_per_device:.1f}",
        f"{found.acceptance_length:.2f}",
        hits,
        f"{found.stall_rate:.0%}",
        f"{found.round_ms:.2f}",
        over,
    )


def _print(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in head:
        table.add_column(column, justify="left" if column in _TEXTS else "right")
    for line in lines:
        table.add_row(*line)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(table)
