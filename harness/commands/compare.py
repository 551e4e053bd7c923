"""`harness compare`: is a newer run slower than an older one? For people and for CI."""

from __future__ import annotations

from pathlib import Path

import click

_FORMATS = ("table", "markdown", "json", "junit")


class Share(click.ParamType[float]):
    """`5%` or `0.05`."""

    name = "share"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value)
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            self.fail(f"{text}: must look like 5% or 0.05", param, ctx)
        return share


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--fail-on-regression",
    "tolerance",
    type=Share(),
    metavar="SHARE",
    help="Exit with 1 when a cell is slower by more than this, e.g. 5%.",
)
@click.option("--format", "style", type=click.Choice(_FORMATS), default="table")
@click.option(
    "--allow-different-machines", is_flag=True, help="Compare runs of unlike machines, and say so."
)
def compare(
    base: Path, new: Path, tolerance: float | None, style: str, allow_different_machines: bool
) -> int:
    """Compare the cells that the run directories BASE and NEW have in common.

    A cell has regressed when the whole interval of its speed, NEW over BASE, lies below 1 minus the
    tolerance (5% unless given), or below the noise of the runs' own A/A controls where that is
    wider. Each change is blamed on acceptance, hit rate or step time.
    """
    from harness.comparison import DEFAULT_TOLERANCE, compare_runs
    from harness.comparison_formats import FORMATS
    from harness.store import read_run

    found = compare_runs(
        read_run(base),
        read_run(new),
        (str(base), str(new)),
        DEFAULT_TOLERANCE if tolerance is None else tolerance,
        allow_different_machines=allow_different_machines,
    )
    click.echo(FORMATS[style](found))
    return int(tolerance is not None and bool(found.regressions))
