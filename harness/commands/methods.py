"""`harness methods`: which decoding methods are installed, with their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from harness.decoder import Decoder


@click.command()
def methods() -> None:
    """List the decoding methods and their options (--set METHOD.OPTION=VALUE)."""
    from harness.errors import HarnessError
    from harness.messages import first_line
    from harness.registry import available, decoder_class

    for name in available():
        try:
            lines = describe_method(name, decoder_class(name))
        except HarnessError as error:
            lines = [f"{name}  broken: {first_line(error)}"]
        click.echo("\n".join(lines))


def describe_method(name: str, decoder: type[Decoder]) -> list[str]:
    """The method's line, then one line for each option with its default and what tuning tries."""
    traits = ["asynchronous" if decoder.asynchronous else "synchronous"]
    if decoder.needs_draft:
        traits.append("needs a draft model")
    lines = [f"{name}  {', '.join(traits)}"]
    for key, field in decoder.Options.model_fields.items():
        default = "required" if field.is_required() else repr(field.get_default())
        tried = ", ".join(map(str, decoder.Options.tuning_grid.get(key, ())))
        grid = f" (tuned over {tried})" if tried else ""
        lines.append(f"    {name}.{key} = {default}  {field.description or ''}{grid}".rstrip())
    return lines
