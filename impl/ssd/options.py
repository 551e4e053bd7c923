"""Parameters of SSD/Saguaro; every mechanism can be switched off for an ablation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from harness.decoder import TuningGrid
from impl.engine.asynchronous_decoder import AsynchronousOptions

MAX_AUTO_LOOKAHEAD = 8
MAX_AUTO_BUDGET = 16


class SaguaroOptions(AsynchronousOptions):
    """See the paper (arXiv 2603.03251) and the modules of `impl/ssd`."""

    tuning_grid: ClassVar[TuningGrid] = {"lookahead": (3, 4, 6, "auto"), "budget": (4, 8, "auto")}

    lookahead: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        "auto",
        description="draft tokens a round (K) at most; auto: as many as are worth their time",
    )
    budget: Annotated[int, Field(ge=0, le=512)] | Literal["auto"] = Field(
        "auto",
        description="outcomes guessed for each sequence (B) at most; auto: while they are worth it",
    )
    build: Literal["likeliest", "all"] = Field(
        "likeliest", description="which branches a pass extends: those that save most time, or all"
    )
    fan_out: Literal["uniform", "geometric", "adaptive", "confidence"] = Field(
        "confidence",
        description="how the budget is spread: evenly, by the closed form at a fixed acceptance, "
        "by the closed form at the run's own, or by the draft's confidence in each token",
    )
    acceptance: float = Field(0.8, ge=0, le=1, description="a of the geometric fan-out")
    exponent: float = Field(1.0, ge=0, description="r of the geometric fan-out")
    least_chance: float = Field(
        0.005, ge=0, le=1, description="outcomes less likely than this are not guessed (confidence)"
    )
    saguaro_c: float = Field(1.0, ge=0, le=1, description="C of Saguaro sampling; 1 is plain")
    saguaro_top: int = Field(4, ge=0, description="how many top tokens C applies to (F)")
    fallback: Literal["neural", "fast", "adaptive"] = Field(
        "adaptive", description="who drafts after a miss"
    )
    return_short: bool = Field(
        True,
        description="hand over a hit as found, a miss once another token is not worth its time",
    )

    @property
    def max_lookahead(self) -> int:
        """Most tokens a speculation can have."""
        return MAX_AUTO_LOOKAHEAD if self.lookahead == "auto" else self.lookahead

    @property
    def max_budget(self) -> int:
        """Most outcomes guessed for one sequence."""
        return MAX_AUTO_BUDGET if self.budget == "auto" else self.budget
