"""What a working draft costs the target: a verification beside it, against one alone.

Target and draft run on devices of their own but share what lies between them, on a CPU the
memory's bandwidth. An asynchronous decoder that has measured both says so in its diagnostics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Contention:
    """Durations of one verification, in milliseconds.

    Attributes:
        verify_idle_ms: while the draft rests.
        verify_loaded_ms: while the draft works.
    """

    verify_idle_ms: float
    verify_loaded_ms: float

    @property
    def sentence(self) -> str:
        """In words, with the slowdown."""
        slowdown = self.verify_loaded_ms / self.verify_idle_ms - 1
        return (
            f"a verification takes {self.verify_idle_ms:.1f} ms alone, "
            f"{self.verify_loaded_ms:.1f} ms beside the working draft ({slowdown:+.0%})"
        )


_LEAST_OVER_TIMED = 0.7  # contention that comes and goes explains 1 / 1.35 (docs/experiments.md)


def timing_was_disturbed(diagnostics: Mapping[str, Any]) -> bool:
    """Whether verifications took far less time than the method had timed beside its draft."""
    return float(diagnostics.get("verify_over_timed", 1.0)) < _LEAST_OVER_TIMED


def contention(diagnostics: Mapping[str, Any]) -> Contention | None:
    """From a decoder's diagnostics; None where it has not measured it."""
    idle, loaded = diagnostics.get("verify_idle_ms"), diagnostics.get("verify_loaded_ms")
    return Contention(float(idle), float(loaded)) if idle and loaded else None
