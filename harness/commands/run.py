"""`harness run`: the options of a run, laid over its run file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.config import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])


def comma_list(value: str) -> tuple[str, ...]:
    """`a,b,c` as a tuple; what the items mean is checked with the rest of the run file."""
    items = tuple(item.strip() for item in value.split(","))
    if not all(items):
        raise ValueError(value)
    return items


PATH = click.Path(path_type=Path)
PLACEMENT = {
    "placement": "convention",
    "target_cores": "target_cores",
    "draft_cores": "draft_cores",
    "target_devices": "target_devices",
    "draft_device": "draft_device",
    "channel": "channel",
}
# Where inputs are read from and who measures: of no weight for a run's identity.
PLACES = ("data_dir", "cache_dir", "launcher")


RUN_OPTIONS = (
    click.option("--config", type=PATH, help="Run file (YAML); the options below win over it."),
    click.option("--methods", type=comma_list, help="Decoding methods, e.g. ar,sd,ssd."),
    click.option(
        "--set", "settings", multiple=True, metavar="METHOD.KEY=VALUE", help="Method option."
    ),
    click.option("--pair", help="Target/draft pair by name (see harness pairs list)."),
    click.option("--pairs-file", type=PATH, help="Further pairs (YAML, as our pairs.yaml)."),
    click.option("--target", help="Target weights instead of a pair: folder, GGUF file or hub id."),
    click.option("--draft", help="Draft weights, with --target."),
    click.option("--engine", help="lean (default), or hf: transformers' layers, any architecture."),
    click.option("--dtype", help="Of weights and computation; the pair's own by default."),
    click.option("--draft-vocab", type=int, help="Tokens of the draft's output head; 0 keeps all."),
    click.option("--draft-quantization", help="Of the draft's layers: none, int8 or int4."),
    click.option("--datasets", type=comma_list, help="Prompt sets (see harness datasets list)."),
    click.option("--datasets-file", type=PATH, help="Further datasets (YAML, as our registry)."),
    click.option("--prompts", type=int, help="Prompts of each dataset; all by default."),
    click.option(
        "--split", help="Prompts of it: evaluation, tuning or all; evaluation by default."
    ),
    click.option("--max-new-tokens", type=int, help="Most tokens emitted for a prompt."),
    click.option("--temperatures", type=comma_list, help="e.g. 0,1; 0 is greedy."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 is off."),
    click.option(
        "--top-p", type=float, help="Keep the most likely tokens up to this mass; 1 is off."
    ),
    click.option("--batch-sizes", type=comma_list, help="Sequences decoded together, e.g. 1,4."),
    click.option("--repeats", type=int, help="How often every cell decodes every prompt."),
    click.option("--seed", type=int, help="Of sampling and of the order of cells."),
    click.option("--max-context", type=int, help="Most tokens of prompt and output together."),
    click.option("--block-size", type=int, help="Prompts measured before the next cell's turn."),
    click.option("--target-cores", type=comma_list, help="Cores of the target, e.g. 0."),
    click.option("--draft-cores", type=comma_list, help="Cores of the draft worker, e.g. 1."),
    click.option("--target-devices", help="Of the target: cpu, cuda:0 or cuda:0-3."),
    click.option("--draft-device", help="Of the draft worker: cpu, cuda:4; of several: cuda:4-5."),
    click.option("--channel", help="To the draft worker: shared (memory) or distributed."),
    click.option("--devices", help="emulated:PROFILE: passes take a profile's time (EMULATED)."),
    click.option("--acceptance", help="synthetic:0.8: a coin accepts drafted tokens (SYNTHETIC)."),
    click.option("--weights", help="random: made-up weights of the pair's shape; or real."),
    click.option("--placement", help="Cores of synchronous methods: equal-target or pooled."),
    click.option("--tuned/--no-tuned", default=None, help="Use what harness tune chose."),
    click.option(
        "--deterministic/--no-deterministic", default=None, help="No choice follows the clock."
    ),
    click.option("--control/--no-control", default=None, help="Measure the baseline twice (A/A)."),
    click.option("--warmup-steps", type=int, help="Most unmeasured steps before the first item."),
    click.option("--raw/--no-raw", default=None, help="Prompts without the chat template."),
    click.option(
        "--isolate/--no-isolate",
        default=None,
        help="Measure every group of cells in a fresh process (default).",
    ),
    click.option("--launcher", help="local (default), or ray: over a cluster (docs/cluster.md)."),
    click.option("--require-accelerator", help="Only machines with this GPU, e.g. H100."),
    click.option("--worker-timeout-s", type=float, help="A worker busy for longer is ended."),
    click.option("--system", help="System prompt of the chat template."),
    click.option(
        "--data-dir", type=PATH, envvar="HARNESS_DATA_DIR", help="Mirror of JSONL prompts."
    ),
    click.option(
        "--cache-dir", type=PATH, envvar="HARNESS_CACHE_DIR", help="Where weights are kept."
    ),
)  # what is decoded and how: `harness run` and `harness verify` take them alike


def run_options(command: Command) -> Command:
    """Adds the options that say what is decoded and how."""
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command


def run_config(config: Path | None, settings: tuple[str, ...], given: dict[str, Any]) -> RunConfig:
    """The run file with the options that were given laid over it."""
    from harness.config import load, parse_settings

    overrides = {key: value for key, value in given.items() if value is not None}
    placement = {PLACEMENT[key]: overrides.pop(key) for key in PLACEMENT if key in overrides}
    if placement:
        overrides["placement"] = placement
    if settings:
        overrides["options"] = parse_settings(settings)
    return load(config, overrides)


@click.command()
@run_options
@click.option(
    "--verify/--no-verify", default=None, help="Certify that no method changes the distribution."
)
@click.option("--out", type=PATH, help="Run directory; runs/TIME by default.")
@click.option(
    "--resume",
    type=PATH,
    metavar="DIR",
    help="Continue the run in DIR, with its own options; options given beside it must agree.",
)
def run(
    config: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    **given: Any,
) -> int:
    """Measure methods on prompts and store the run."""
    from harness import runner
    from harness.commands.show import print_run
    from harness.progress import progress

    bar = progress(sys.stderr)
    if resume is None:
        summary = runner.run(run_config(config, settings, given), out or default_out(), bar)
    elif out is not None:
        raise UsageError("--out: has no place beside --resume; drop one of them")
    else:
        places = {name: given[name] for name in PLACES}
        options = {name: value for name, value in given.items() if name not in PLACES}
        named = config or settings or any(value is not None for value in options.values())
        chosen = run_config(config, settings, given) if named else None
        summary = runner.resume(resume, bar, config=chosen, places=places)
    print_run(summary.directory)
    for failure in summary.failures:
        click.echo(f"failed: {failure.item}: {failure.error}: {failure.message}", err=True)
    for fault in summary.faults:
        click.echo(f"does not add up: {fault}", err=True)
    click.echo(f"{summary.status}: {summary.directory}")
    return summary.exit_code


def default_out() -> Path:
    """`runs/` and the time in UTC, to the second."""
    return Path("runs") / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
