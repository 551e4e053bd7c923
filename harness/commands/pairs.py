"""`harness pairs`: the target/draft pairs, whether they fit this machine, and their weights."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.decoder import Placement
    from harness.memory import DeviceNeed, ModelNeed
    from harness.pairs import Model, Pair

pairs_file_option = click.option(
    "--pairs-file",
    type=click.Path(path_type=Path),
    help="Further pairs (YAML, as our pairs.yaml).",
)


@click.group()
def pairs() -> None:
    """List, show, check or fetch the target/draft pairs."""


@pairs.command("list")
@pairs_file_option
def list_pairs(pairs_file: Path | None) -> None:
    """Name, pin, description and licence of every pair."""
    from harness.pairs import load_pairs

    known = load_pairs(pairs_file)
    width = max(map(len, known))
    for name, pair in sorted(known.items()):
        click.echo(f"{name:{width}}  {_pin(pair):8}  {pair.description}  ({pair.licence})")


def _pin(pair: Pair) -> str:
    if not all(model.sources for model in pair.models.values()):
        return "sizes"
    return "pinned" if all(model.pinned for model in pair.models.values()) else "unpinned"


@pairs.command()
@click.argument("name")
@pairs_file_option
def show(name: str, pairs_file: Path | None) -> None:
    """Files, checksums and sources of a pair."""
    from harness.pairs import find_pair

    pair = find_pair(name, pairs_file)
    click.echo(f"name         {pair.name}")
    click.echo(f"description  {pair.description}")
    click.echo(f"licence      {pair.licence}")
    click.echo(f"dtype        {pair.dtype}")
    click.echo(f"draft_vocab  {pair.draft_vocab or 'all'}")
    click.echo(f"draft in     {pair.draft_quantization or pair.dtype}")
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        click.echo(f"{role:6}       " + ("none" if model is None else describe_model(model)))


@pairs.command()
@click.argument("name")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="HARNESS_CACHE_DIR",
    help="Where weights are kept.",
)
@click.option("--offline", is_flag=True, help="Use nothing but this machine.")
@pairs_file_option
def pull(name: str, cache_dir: Path | None, offline: bool, pairs_file: Path | None) -> None:
    """Fetch, verify and convert a pair's weights; quick when they are here already."""
    from harness.cache import default_cache_dir
    from harness.pairs import find_pair, resolve
    from harness.progress import progress

    pair = find_pair(name, pairs_file)
    cache = default_cache_dir(cache_dir)
    download = progress(sys.stderr).download
    found = resolve(pair, cache, progress=download, offline=offline)
    for role, model in (("target", found.target), ("draft", found.draft)):
        if model is not None:
            click.echo(f"{role:6}  {model.folder}  (from {model.source}, sha256 {model.sha256})")


@pairs.command()
@click.argument("name")
@click.option("--max-context", type=int, default=2048, help="Tokens of a sequence; 2048.")
@click.option("--batch-size", type=int, default=1, help="Sequences decoded together; 1.")
@click.option("--target-devices", help="Of the target: cpu, cuda:0 or cuda:0-3; a GPU if any.")
@click.option("--draft-device", help="Of the draft worker: cpu or cuda:4; another GPU if any.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@pairs_file_option
def check(
    name: str,
    max_context: int,
    batch_size: int,
    target_devices: str | None,
    draft_device: str | None,
    as_json: bool,
    pairs_file: Path | None,
) -> int:
    """Say before any download whether a pair fits this machine's memory; exit 1 when not."""
    from harness.memory import available_memory, device_needs, model_need
    from harness.pairs import find_pair
    from harness.store import to_json

    pair = find_pair(name, pairs_file)
    needs = {
        role: model_need(model.known_shape(), pair.dtype, max_context, batch_size)
        for role, model in pair.models.items()
    }
    where = _placement(target_devices, draft_device)
    devices = device_needs(needs["target"], needs.get("draft"), available_memory(), where)
    fits = all(device.fits for device in devices)
    if as_json:
        told = {"max_context": max_context, "batch_size": batch_size, "dtype": pair.dtype}
        click.echo(to_json(_check_entry(pair, needs, devices) | told))
    else:
        click.echo("\n".join(_check_lines(pair, needs, devices)))
    return 0 if fits else 1


def _placement(target_devices: str | None, draft_device: str | None) -> Placement | None:
    """Where the models are to be; None where nothing is said of it."""
    from harness.decoder import Placement
    from harness.devices import with_devices

    named = {"target_devices": target_devices, "draft_device": draft_device}
    if not any(named.values()):
        return None
    try:
        return Placement(**with_devices({k: name for k, name in named.items() if name}))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_entry(
    pair: Pair, needs: dict[str, ModelNeed], devices: tuple[DeviceNeed, ...]
) -> dict[str, Any]:
    return {
        "pair": pair.name,
        "fits": all(device.fits for device in devices),
        "pinned": all(model.pinned for model in pair.models.values()),
        "gated": [model.hub_repo for model in pair.models.values() if model.gated],
        "models": {role: asdict(need) for role, need in needs.items()},
        "devices": [asdict(device) | {"fits": device.fits} for device in devices],
    }


def _check_lines(
    pair: Pair, needs: dict[str, ModelNeed], devices: tuple[DeviceNeed, ...]
) -> list[str]:
    from harness.hub import how_to_get

    lines = [
        f"{role:6}  {need.parameters / 1e9:.2f} B parameters, weights {need.weight_bytes / 1e9:.2f}"
        f" GB in {pair.dtype}, KV {need.kv_bytes / 1e9:.2f} GB"
        for role, need in needs.items()
    ]
    lines += [
        f"{role:6}  gated: {how_to_get(model.hub_repo)}"
        for role, model in pair.models.items()
        if model.gated and model.hub_repo
    ]
    return lines + [
        f"{device.device:6}  {'fits' if device.fits else 'does not fit'}: needs "
        f"{device.need_bytes / 1e9:.2f} GB for {device.holds}, {device.available_bytes / 1e9:.2f} "
        "GB free"
        for device in devices
    ]


def describe_model(model: Model) -> str:
    """File, size and checksum on one line, one line more for each source."""
    pinned = f"{model.file}  {model.bytes / 1e6:.0f} MB  sha256 {model.sha256}"
    sources = [f"\n             from {source}" for source in model.sources]
    if not model.sources:
        return "sizes alone, for --weights random"
    by_place = "pinned by its source" if model.pinned else "unpinned"
    return (pinned if model.sha256 else by_place) + "".join(sources)
