"""`harness datasets`: the prompt sets, and what one of them holds."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def datasets() -> None:
    """List or show the prompt sets."""


@datasets.command("list")
def list_datasets() -> None:
    """Name, licence and description of every dataset."""
    from harness.dataset_sources import load_registry

    known = load_registry().datasets
    width = max(map(len, known))
    for name, dataset in sorted(known.items()):
        click.echo(f"{name:{width}}  {dataset.description}  ({dataset.licence})")


@datasets.command()
@click.argument("name")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    envvar="HARNESS_DATA_DIR",
    help="Mirror folder of JSONL files.",
)
def show(name: str, data_dir: Path | None) -> None:
    """Source, checksum, categories and first prompt of a dataset (or of a .jsonl file)."""
    from collections import Counter

    from harness.prompt_split import side_of
    from harness.prompts import load_prompts

    found = load_prompts(name, data_dir=data_dir)
    categories = Counter(prompt.category for prompt in found.prompts)
    click.echo(f"name        {found.name}")
    held = Counter(side_of(prompt.sha256) for prompt in found.prompts)
    click.echo(f"prompts     {found.available} ({held['tuning']} to tune on, not evaluated)")
    click.echo(f"source      {found.source}")
    click.echo(f"licence     {found.licence}")
    click.echo(f"sha256      {found.sha256}")
    click.echo("categories  " + ", ".join(f"{c} {n}" for c, n in sorted(categories.items())))
    first = min(found.prompts, key=lambda prompt: prompt.index)
    for message in first.messages:
        click.echo(f"\n[{message.role}]\n{message.content}")
