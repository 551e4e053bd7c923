"""One colour for one thing, in every figure and table of a page, in light and in dark.

Charts are drawn in marker colours that occur nowhere else; `reports.svg` turns each into the CSS
variable of its name, and `templates/page.css` gives the variables their values (Okabe and Ito's
palette, darkened or lightened until it reads on its background).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_VARIABLES = (
    *("ink", "muted", "rule", "paper"),
    *("verify", "draft", "wait", "transfer", "other", "speculate"),
    *(f"method-{slot}" for slot in range(1, 9)),
)
_MARKER = re.compile(r"#0a00([0-9a-f]{2})")
_KNOWN_METHODS = ("ar", "sd", "ssd", "tree", "amusd", "pearl")
_GLYPHS = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "X": "✖", "p": "⬟"}
_SHAPES = tuple(_GLYPHS)


class MethodStyle(NamedTuple):
    """How one method looks: a CSS variable and, for those who cannot tell colours, a shape."""

    variable: str
    shape: str

    @property
    def glyph(self) -> str:
        """The shape as a character, for legends."""
        return _GLYPHS[self.shape]

    @property
    def colour(self) -> str:
        """The marker colour to draw with."""
        return drawn(self.variable)


def drawn(variable: str) -> str:
    """The marker colour that stands for a CSS variable in a drawing."""
    return f"#0a00{_VARIABLES.index(variable):02x}"


def to_css(svg: str) -> str:
    """Replaces every marker colour by its CSS variable."""
    return _MARKER.sub(lambda match: f"var(--{_VARIABLES[int(match[1], 16)]})", svg)


def light_colours() -> Mapping[str, str]:
    """Marker colour -> the colour of its variable on light paper, from the pages' style sheet."""
    sheet = Path(__file__).with_name("templates").joinpath("page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6})", sheet.partition("@media")[0]))
    return {drawn(variable): light[variable] for variable in _VARIABLES}


def method_styles(methods: Iterable[str]) -> Mapping[str, MethodStyle]:
    """Styles by method: ours always look the same, others take the slots that ours leave free.

    With more methods than slots a colour comes again, in another shape.
    """
    named = set(methods)
    ours = {method: slot for slot, method in enumerate(_KNOWN_METHODS) if method in named}
    free = [slot for slot in range(len(_SHAPES)) if slot not in ours.values()]
    looks = {method: (slot, slot) for method, slot in ours.items()}
    for number, method in enumerate(sorted(named - set(ours))):
        turn, place = divmod(number, len(free) or len(_SHAPES))
        slot = free[place] if free else place
        looks[method] = slot, (slot + 3 * (turn + (not free))) % len(_SHAPES)
    return {
        method: MethodStyle(f"method-{slot + 1}", _SHAPES[shape])
        for method, (slot, shape) in looks.items()
    }
