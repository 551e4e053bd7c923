"""Wording of errors: one clear line that names the field at fault and the nearest right name."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
_UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")


def unknown(kind: str, name: str, known: Iterable[str], see: str = "") -> str:
    """The line for a name that does not exist, with the nearest one that does.

    >>> unknown("method", "sdd", ["ar", "sd"], see="harness methods")
    'unknown method "sdd": did you mean "sd"? (see harness methods)'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known) or 'none'}"
    return f'unknown {kind} "{name}": {hint}' + (f" (see {see})" if see else "")


def describe(error: ValidationError, known: Iterable[str], prefix: str = "") -> str:
    """A pydantic error as one line, every field at fault named by its path.

    Args:
        error: what pydantic raised.
        known: the valid field names, for near matches.
        prefix: path of the validated object, in front of every field.
    """
    known = sorted(known)
    return "; ".join(_describe_one(detail, known, prefix) for detail in error.errors())


def first_line(error: BaseException) -> str:
    """An exception's message cut to its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """Text of unknown origin for a terminal: control characters (and so escapes) replaced."""
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" else each for each in text)


def markdown(text: str) -> str:
    """Text of unknown origin for a line or table cell of Markdown: no borders, no markup."""
    for character in "\\|<>`*_[":
        text = text.replace(character, "\\" + character)
    return printable(text.replace("\n", " "))


def _describe_one(detail: Any, known: list[str], prefix: str) -> str:
    names = [str(part) for part in detail["loc"]]
    where = ".".join([prefix, *names] if prefix else names)
    if detail["type"] in _UNKNOWN_FIELD:
        return unknown("option", where, [f"{prefix}.{name}" if prefix else name for name in known])
    if detail["type"] in _BOUNDS:
        sign, key = _BOUNDS[detail["type"]]
        reason = f"must be {sign} {detail['ctx'][key]:g}"
    elif detail["type"] == "value_error":
        reason = str(detail["ctx"]["error"])
    else:
        reason = detail["msg"].replace("Input should be", "must be")
        reason += f", got {detail['input']!r}" if detail["type"] != "missing" else ""
    return f"{where}: {reason}" if where else reason
