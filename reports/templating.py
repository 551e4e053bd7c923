"""Pages from the templates of `reports/templates`: everything in them is escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from harness.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    import jinja2


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_template(name: str, **values: Any) -> str:
    """A template of `reports/templates` with its values; an unknown name in it is an error."""
    return _environment().get_template(name).render(**values)


def write_text(path: Path, text: str) -> Path:
    """Writes a file of a report, its folders made where they do not exist.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path
