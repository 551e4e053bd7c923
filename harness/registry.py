"""Method name -> `Decoder` class, through the entry-point group `harness.decoders`.

Names are listed without importing any method; a class is imported when it is asked for. Knows no
method by name. A method is called `NAME` or, to run it with several settings side by side, a
variant `NAME:LABEL`: the same class under a name, and with options, of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError, UsageError
from harness.messages import describe, first_line, unknown

if TYPE_CHECKING:
    from harness.decoder import Decoder, DecoderOptions

GROUP = "harness.decoders"


def available() -> dict[str, EntryPoint]:
    """Every registered method, in order of name; nothing is imported."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def registered_name(method: str) -> str:
    """`NAME` of a method that is called `NAME` or `NAME:LABEL`.

    Raises:
        UsageError: no such method (the message has the near match), or an empty label.
    """
    name, colon, label = method.partition(":")
    if colon and not label:
        raise UsageError(f'method "{method}": needs a label behind the colon, as in {name}:a')
    points = available()
    if name not in points:
        raise UsageError(unknown("method", name, points, see="harness methods"))
    return name


def decoder_class(method: str) -> type[Decoder]:
    """Imports and returns the class of a method.

    Raises:
        UsageError: no such method.
        HarnessError: its entry point cannot be loaded, or is no decoder.
    """
    from harness.decoder import Decoder

    name = registered_name(method)
    point = available()[name]
    where = f"method {name!r} ({point.value})"
    try:
        loaded = point.load()
    except Exception as error:  # whatever another package's import raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise HarnessError(f"{where} cannot be loaded: {reason}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Decoder)):
        raise HarnessError(f"{where} is not a subclass of harness.decoder.Decoder")
    return loaded


def decoder_options(method: str, values: Mapping[str, Any]) -> DecoderOptions:
    """Validates a method's own parameters; those left out of `values` keep its defaults.

    Raises:
        UsageError: unknown method or key (with the near match), or a value out of its range.
    """
    from pydantic import ValidationError

    options = decoder_class(method).Options
    try:
        return options.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(describe(error, options.model_fields, prefix=method)) from error
