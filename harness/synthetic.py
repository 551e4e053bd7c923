"""Synthetic acceptance: a coin decides which drafted tokens are accepted, on whatever weights.

For timing hardware: every pass, cache, message and verification is real, the text is not
(`impl.engine.synthetic_model`). Figures of such a run are labelled (`harness.labels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.errors import UsageError
from harness.simulation.acceptance import Acceptance

if TYPE_CHECKING:
    from harness.config import RunConfig
    from harness.decoder_pool import Method
    from impl.engine.models import ModelSpec
    from impl.engine.synthetic_model import Coin

PREFIX = "synthetic:"
_LETTERS = 4096  # of the alphabet that texts are made of, at most


def parse(acceptance: str) -> Acceptance:
    """`synthetic:RATE` or `synthetic:RATE:EXPONENT`. Raises `UsageError`."""
    rate, _, exponent = acceptance.removeprefix(PREFIX).partition(":")
    try:
        return Acceptance((float(rate),), float(exponent or 1.0))
    except ValueError as error:
        raise UsageError(
            f"acceptance: {acceptance} must look like {PREFIX}0.8 or {PREFIX}0.8:1.5"
        ) from error


def describe(config: RunConfig) -> str | None:
    """What is synthetic of a run, in words; None of a real one."""
    if config.acceptance is None:
        return None
    found = parse(config.acceptance)
    exponent = "" if found.exponent == 1 else f" with exponent {found.exponent:g}"
    weights = ", random weights" if config.weights == "random" else ""
    return f"acceptance {found.rates[0]:g}{exponent}{weights}"


def check(config: RunConfig, methods: Mapping[str, Method]) -> None:
    """Raises `UsageError` unless the methods can have the run's acceptance."""
    if config.acceptance is None:
        return
    parse(config.acceptance)
    if others := [name for name, own in methods.items() if not own.decoder.takes_synthetic]:
        raise UsageError(
            f"methods: {', '.join(others)} cannot have a synthetic acceptance, for not all that "
            "decides their tokens are the two models; drop them or --acceptance"
        )


def refuse(config: RunConfig, reason: str) -> None:
    """Raises `UsageError` where a coin decides what is accepted."""
    if config.acceptance is not None:
        raise UsageError(f"acceptance: {config.acceptance} is synthetic, and {reason}")


def with_coin(
    config: RunConfig, target: ModelSpec, draft: ModelSpec | None
) -> tuple[ModelSpec, ModelSpec | None]:
    """The models of a run with the coin that decides what they agree on, where it has one."""
    if config.acceptance is None:
        return target, draft
    coin = _coin(config, target, draft)
    drafts = None if draft is None else replace(draft, coin=coin._replace(role="draft"))
    return replace(target, coin=coin), drafts


def _coin(config: RunConfig, target: ModelSpec, draft: ModelSpec | None) -> Coin:
    from impl.engine.synthetic_model import Coin

    found = parse(str(config.acceptance))
    ids = None if draft is None else draft.head_ids()
    size = min(spec.width() for spec in (target, draft) if spec is not None)
    letters = range(min(size, _LETTERS)) if ids is None else tuple(ids[:_LETTERS].tolist())
    return Coin(found.rates[0], found.exponent, config.seed, letters, "target")
