"""Matplotlib figures as inline SVG that follows the page: its font, its colours, its light or dark.

The same figure always gives the same bytes. No pyplot figure is made, so nothing is left behind.
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from reports.colours import drawn, light_colours, to_css

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.figure import Figure

PANEL_WIDTH = 460.0  # units of 1/72 inch; also the CSS pixels of a panel at its natural size

_FONT_FAMILY = re.compile(r"font-family: [^;\"]*(?:;\s*)?")
_ROOT = re.compile(r"<svg\b([^>]*)>", re.DOTALL)
_SIZE = re.compile(r'\s(?:width|height|version|xmlns(?::xlink)?)="[^"]*"')
_STYLE_SHEET = re.compile(r"<defs>\s*<style\b.*?</style>\s*</defs>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_IDENTIFIER = re.compile(r'(\bid="|url\(#|href="#)')
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def style() -> AbstractContextManager[None]:
    """The look of every chart: quiet axes, thin grid, the page's colours."""
    import matplotlib
    import seaborn

    look: Any = seaborn.axes_style("ticks") | {
        "font.size": 12.0,
        "font.sans-serif": ["DejaVu Sans"],
        "text.parse_math": False,  # a "$" in a name is a "$"
        "text.color": drawn("ink"),
        "axes.edgecolor": drawn("rule"),
        "axes.facecolor": "none",
        "axes.labelcolor": drawn("muted"),
        "axes.labelsize": 12.0,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.unicode_minus": True,
        "figure.facecolor": "none",
        "grid.color": drawn("rule"),
        "grid.linewidth": 0.6,
        "xtick.color": drawn("rule"),
        "xtick.labelcolor": drawn("muted"),
        "ytick.color": drawn("rule"),
        "ytick.labelcolor": drawn("muted"),
        "svg.fonttype": "none",  # text stays text: searchable, read aloud, in the page's own font
        "svg.hashsalt": "reports",
    }
    return matplotlib.rc_context(look)


def new_figure(height: float, width: float = PANEL_WIDTH) -> Figure:
    """An empty figure of `width` x `height` CSS pixels, on no backend."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def bar_edge(length: float, whole: float) -> float:
    """Width of the line in the page's colour around a bar; a thin bar has none, or it would vanish.

    Args:
        length: of the bar, in units of the axis.
        whole: what the axis holds.
    """
    return 0.8 if length > whole / 50 else 0.0


def inline_svg(figure: Figure, key: str, title: str, description: str) -> Markup:
    """Renders a figure for the body of an HTML page.

    Args:
        figure: drawn under `style()`, which must still be in force.
        key: unique on the page; every id in the SVG starts with it.
        title: what the chart is, for those who do not see it.
        description: what it shows, with its numbers, for the same.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The browser sets the text: a letter that matplotlib's font lacks is shown all the same.
        warnings.filterwarnings(
            "ignore", message=r"Glyph .* missing from font", category=UserWarning
        )
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    source = _STYLE_SHEET.sub("", buffer.getvalue(), count=1)
    # Tags only: in text and attributes "<" and ">" are escaped, so no name can look like one.
    source = _TAG.sub(lambda tag: _adapted(tag[0], key), source)
    return _labelled(source, key, title, description)


def standalone_svg(figure: Figure, key: str, title: str, description: str) -> str:
    """Renders a figure as a file of its own, with the page's colours; arguments as `inline_svg`."""
    page = Path(__file__).with_name("templates").joinpath("page.css").read_text(encoding="utf-8")
    colours = page[: page.index("*, *::before")]  # the variables, light and dark
    look = f"<style>{colours} svg {{ font-family: var(--sans); background: var(--paper) }}</style>"
    source = str(inline_svg(figure, key, title, description))
    source = source.replace("<svg ", f"<svg {_NAMESPACES} ", 1)
    return source.replace("</desc>", f"</desc>{look}", 1) + "\n"


def save_png(figure: Figure, path: Path) -> None:
    """Renders a figure as a PNG file on white paper, in the page's light colours, at 200 dpi.

    Args:
        figure: drawn under `style()`; its colours are replaced.
        path: the file; its folder exists.
    """
    from matplotlib.colors import to_hex, to_rgba

    light = light_colours()
    for artist in figure.findobj():
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            colour = get()
            if isinstance(colour, str | tuple) and (new := light.get(to_hex(colour))):
                put(to_rgba(new, to_rgba(colour)[3]))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Glyph .* missing from font", category=UserWarning
        )
        figure.savefig(path, format="png", dpi=200, facecolor="white")


def _adapted(tag: str, key: str) -> str:
    """A tag in the page's font and colours, its ids made unique to the figure."""
    return _IDENTIFIER.sub(rf"\g<1>{key}-", to_css(_FONT_FAMILY.sub("", tag)))


def _labelled(source: str, key: str, title: str, description: str) -> Markup:
    root = _ROOT.search(source)
    if root is None:  # pragma: no cover - matplotlib always writes one
        raise ValueError("matplotlib wrote no <svg> element")
    attributes = Markup(_SIZE.sub("", root[1]).strip())
    opening = Markup(
        '<svg {} role="img" aria-labelledby="{key}-title {key}-desc" style="--natural:{width}px">'
        '<title id="{key}-title">{}</title><desc id="{key}-desc">{}</desc>'
    ).format(attributes, title, description, key=key, width=_natural_width(root[1]))
    return opening + Markup(source[root.end() :].strip())


def _natural_width(attributes: str) -> int:
    match = re.search(r'viewBox="0 0 ([\d.]+)', attributes)
    return round(float(match[1]) * 1.12) if match else round(PANEL_WIDTH)
