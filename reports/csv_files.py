"""Tables as CSV that a spreadsheet opens as data: no text in it is taken for a formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # OWASP, "CSV Injection"


def csv_text(table: pd.DataFrame) -> str:
    """The table with a line of headings; text that would start a formula has a `'` before it."""
    named = table.rename(columns=_as_text)
    return str(named.map(_as_text).to_csv(index=False))


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
