"""`harness datasets`: the prompt sets, fetching one, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from harness.dataset_registry import DatasetRegistry
    from harness.prompts import PromptSet

Command = TypeVar("Command", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)
_SHOWN_CHARACTERS = 2000  # of the first prompt

_datasets_file = click.option(
    "--datasets-file", type=_PATH, help="Further datasets (YAML, as our registry)."
)


def _places(command: Command) -> Command:
    """Adds the options that say where files are looked for."""
    for option in (
        _datasets_file,
        click.option("--offline", is_flag=True, help="Use nothing but this machine."),
        click.option(
            "--cache-dir", type=_PATH, envvar="HARNESS_CACHE_DIR", help="Where downloads are kept."
        ),
        click.option(
            "--data-dir", type=_PATH, envvar="HARNESS_DATA_DIR", help="Mirror folder of prompts."
        ),
    ):
        command = option(command)
    return command


@click.group()
def datasets() -> None:
    """List, fetch or show the prompt sets."""


@datasets.command("list")
@_datasets_file
def list_datasets(datasets_file: Path | None) -> None:
    """Name, pin, licence, sources and description of every dataset."""
    from harness.dataset_registry import load_registry

    known = sorted(load_registry(datasets_file).datasets.items())
    width = max(len(name) for name, _ in known)
    licences = max(len(dataset.licence) for _, dataset in known)
    for name, dataset in known:
        pin = "pinned" if dataset.pinned else "unpinned"
        click.echo(f"{name:{width}}  {pin:8}  {dataset.licence:{licences}}  {dataset.description}")
        for source in dataset.sources:
            pin = "" if source.pinned else ", unpinned"
            click.echo(f"{'':{width}}  {'':8}  {'':{licences}}  from {source}{pin}")


@datasets.command()
@click.argument("name")
@_places
def pull(name: str, **places: Any) -> None:
    """Fetch and check a dataset; quick when it is here already."""
    found = _load(name, **places)
    pin = "pinned" if found.pinned else "unpinned: trusted as it was at its first use here"
    click.echo(f"{found.name}  {found.available} prompts  from {found.source}, {pin}")


@datasets.command()
@click.argument("name")
@_places
def show(name: str, **places: Any) -> None:
    """Source, checksum, categories and first prompt of a dataset (or of a .jsonl file)."""
    from collections import Counter

    from harness.prompt_split import side_of

    found = _load(name, **places)
    categories = Counter(prompt.category for prompt in found.prompts)
    click.echo(f"name        {found.name}")
    held = Counter(side_of(prompt.sha256) for prompt in found.prompts)
    click.echo(f"prompts     {found.available} ({held['tuning']} to tune on, not evaluated)")
    click.echo(f"source      {found.source}{'' if found.pinned else ' (unpinned)'}")
    click.echo(f"licence     {found.licence}")
    click.echo(f"sha256      {found.sha256}")
    click.echo("categories  " + ", ".join(f"{c} {n}" for c, n in sorted(categories.items())))
    first = min(found.prompts, key=lambda prompt: prompt.index)
    for message in first.messages:
        content = message.content or "(what the target answers)"
        left = len(content) - _SHOWN_CHARACTERS
        more = f"\n... {left} characters more" if left > 0 else ""
        click.echo(f"\n[{message.role}]\n{content[:_SHOWN_CHARACTERS]}{more}")


def _load(name: str, datasets_file: Path | None, **places: Any) -> PromptSet:
    from harness.dataset_registry import load_registry
    from harness.prompts import load_prompts

    registry: DatasetRegistry = load_registry(datasets_file)
    return load_prompts(name, registry=registry, **places)
