"""Pages from the templates of `reports/templates`: everything in them is escaped.

The one script that a page has is ours, and its content security policy lets no other run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from harness.errors import StoreError

if TYPE_CHECKING:
    import jinja2


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = Path(__file__).with_name("templates").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    environment.globals.update(script=Markup(script), content_policy=policy)
    return environment


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
