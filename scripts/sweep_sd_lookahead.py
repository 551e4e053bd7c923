"""SD's best lookahead, measured in one interleaved run on prompts that no evaluation uses.

    python scripts/sweep_sd_lookahead.py --config configs/bench-ssd.yaml --out runs/sweep

Takes pair, datasets, lengths and placement from the run file, and from each dataset the prompts
that come behind those of the evaluation. Prints each K's speedup over AR, the geometric mean over
datasets; the largest belongs into the run file as `options: {sd: {lookahead: K}}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import click

from harness.config import RunConfig, load
from harness.errors import HarnessError
from harness.progress import progress
from harness.prompts import load_prompts
from harness.runner import run
from harness.store import read_run
from harness.summary import summarise


def sweep_config(config: RunConfig, lookaheads: range, count: int, folder: Path) -> RunConfig:
    """The run file with one SD a lookahead, greedy, on `count` tuning prompts of each dataset."""
    variants = {f"sd:k{lookahead}": {"lookahead": lookahead} for lookahead in lookaheads}
    datasets = [str(_tuning_file(config, name, count, folder)) for name in config.datasets]
    changes: dict[str, Any] = {
        "methods": ["ar", *variants],
        "options": variants,
        "datasets": datasets,
        "prompts": None,
        "temperatures": [0.0],
        "verify": False,
    }
    return RunConfig.model_validate({**config.model_dump(exclude_unset=True), **changes})


def _tuning_file(config: RunConfig, name: str, count: int, folder: Path) -> Path:
    """Writes the prompts that come behind the evaluation's as a dataset of the same name."""
    used = config.prompts or 0
    found = load_prompts(
        name,
        used + count,
        seed=config.seed,
        data_dir=config.data_dir,
        cache_dir=config.cache_dir,
    )
    tuning = found.prompts[used:] if config.prompts else ()
    if not tuning:
        raise HarnessError(f"prompts: the run file leaves no prompt of {name} to tune on; lower it")
    path = folder / f"{found.name}.jsonl"
    rows = [
        {
            "messages": [message.model_dump() for message in prompt.messages],
            "category": prompt.category,
        }
        for prompt in tuning
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def speedups(directory: Path) -> dict[str, float]:
    """Method -> speedup over AR, the geometric mean over datasets."""
    by_method: dict[str, list[float]] = {}
    for cell in summarise(read_run(directory))["cells"]:
        if not cell["control"] and (ratio := cell["speedup"].get("ar")):
            by_method.setdefault(cell["method"], []).append(ratio["value"])
    return {method: geometric_mean(values) for method, values in by_method.items()}


@click.command(help=__doc__.splitlines()[0])
@click.option("--config", type=click.Path(path_type=Path), default="configs/bench-ssd.yaml")
@click.option("--data-dir", type=click.Path(path_type=Path), envvar="HARNESS_DATA_DIR")
@click.option("--prompts", default=4, show_default=True, help="Tuning prompts of each dataset.")
@click.option("--most", default=8, show_default=True, help="Largest lookahead.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run directory.")
def main(config: Path, data_dir: Path | None, prompts: int, most: int, out: Path) -> None:
    """Runs the sweep and prints it."""
    try:
        chosen = load(config, {} if data_dir is None else {"data_dir": data_dir})
        with TemporaryDirectory() as folder:
            sweep = sweep_config(chosen, range(1, most + 1), prompts, Path(folder))
            run(sweep, out, progress(sys.stderr))
        found = speedups(out)
    except HarnessError as error:
        raise click.ClickException(str(error)) from error
    for method, ratio in found.items():
        click.echo(f"{method}: {ratio:.3f}x AR")
    if found:
        click.echo(f"best: {max(found, key=found.__getitem__)}")


if __name__ == "__main__":
    main()
