"""`harness profile`: what passes cost on this machine, for the simulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from harness.commands.run import PATH, run_config, run_options


@click.command()
@run_options
@click.option("--out", type=PATH, required=True, help="Profile to write (YAML).")
def profile(config: Path | None, settings: tuple[str, ...], out: Path, **given: Any) -> None:
    """Measure the pair's passes here, as harness simulate --profile takes them."""
    from harness.progress import progress
    from harness.simulation.measuring import measure_profile
    from harness.simulation.profile import write_profile

    measured = measure_profile(run_config(config, settings, given), progress(sys.stderr))
    write_profile(measured, out)
    click.echo(f"stored: {out}")
