"""Parameters of SSD/Saguaro."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from harness.decoder import DecoderOptions


class SaguaroOptions(DecoderOptions):
    """See the paper (arXiv 2603.03251) and `impl/ssd/fan_out.py`."""

    lookahead: int = Field(4, ge=1, le=64, description="draft tokens a round (K)")
    budget: int = Field(8, ge=0, le=512, description="outcomes guessed for each sequence (B)")
    fan_out: Literal["uniform", "geometric", "adaptive"] = Field(
        "geometric", description="how the budget is spread over the positions"
    )
    acceptance: float = Field(0.8, ge=0, le=1, description="a of the geometric fan-out")
    exponent: float = Field(1.0, ge=0, description="r of the geometric fan-out")
