"""`harness env`: what this machine is, as every run records it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
def env(as_json: bool) -> None:
    """Show the hardware and software that a run on this machine would record."""
    from harness.decoder import Placement
    from harness.fingerprint import fingerprint
    from harness.store import to_json

    found = fingerprint(Placement())
    if as_json:
        click.echo(to_json(found))
    else:
        click.echo("\n".join(lines(found)))


def lines(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """`key  value` a line, nested mappings indented below their key."""
    width = max(map(len, values), default=0)
    found = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += [f"{indent}{key}", *lines(value, indent + "  ")]
        else:
            found.append(f"{indent}{key:{width}}  {_text(value)}")
    return found


def _text(value: Any) -> str:
    if value is None or value == []:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
