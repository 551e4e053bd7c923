"""Which prompts parameters may be tuned on, and which ones results come from: never the same.

A prompt's side depends on its words alone: not on its dataset, its row, the seed, the pair or the
number of prompts asked for. So a prompt that occurs in two datasets is on one side in both, and no
choice of prompts can bring a tuning prompt into an evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

Side = Literal["evaluation", "tuning"]
Split = Literal["evaluation", "tuning", "all"]

TUNING_ONE_IN = 5  # prompts, on average, that tuning gets


def prompt_sha256(texts: Iterable[str]) -> str:
    """Identity of a prompt: sha256 of its messages, one a line, white space collapsed."""
    return hashlib.sha256("\n".join(" ".join(text.split()) for text in texts).encode()).hexdigest()


def side_of(sha256: str) -> Side:
    """The side of the prompt with this `prompt_sha256`."""
    return "evaluation" if int(sha256[:16], 16) % TUNING_ONE_IN else "tuning"


def holds(split: Split, sha256: str) -> bool:
    """Whether a split has the prompt with this `prompt_sha256`."""
    return split in ("all", side_of(sha256))
