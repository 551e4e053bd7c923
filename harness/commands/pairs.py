"""`harness pairs`: the target/draft pairs, and fetching their weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from harness.cache import default_cache_dir
    from harness.pairs import Model


@click.group()
def pairs() -> None:
    """List, show or fetch the target/draft pairs."""


@pairs.command("list")
def list_pairs() -> None:
    """Name and description of every pair."""
    from harness.pairs import load_pairs

    known = load_pairs()
    width = max(map(len, known))
    for name, pair in sorted(known.items()):
        click.echo(f"{name:{width}}  {pair.description}  ({pair.licence})")


@pairs.command()
@click.argument("name")
def show(name: str) -> None:
    """Files, checksums and sources of a pair."""
    from harness.pairs import find_pair

    pair = find_pair(name)
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
def pull(name: str, cache_dir: Path | None, offline: bool) -> None:
    """Fetch, verify and convert a pair's weights; quick when they are here already."""
    from harness.pairs import find_pair, resolve
    from harness.progress import progress

    pair = find_pair(name)
    cache = default_cache_dir(cache_dir)
    download = progress(sys.stderr).download
    found = resolve(pair, cache, progress=download, offline=offline)
    for role, model in (("target", found.target), ("draft", found.draft)):
        if model is not None:
            click.echo(f"{role:6}  {model.folder}  (from {model.source}, sha256 {model.sha256})")


def describe_model(model: Model) -> str:
    """File, size and checksum on one line, one line more for each source."""
    pinned = f"{model.file}  {model.bytes / 1e6:.0f} MB  sha256 {model.sha256}"
    sources = [f"\n             from {source}" for source in model.sources]
    return (pinned if model.sha256 else "not pinned") + "".join(sources)
