"""Certifies a stored run on the models that it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from harness.equivalence.certificate import Certificate, certify
from harness.equivalence.reference_scores import (
    EngineLogits,
    LogitSource,
    References,
    TransformersLogits,
)
from harness.equivalence.token_table import Scored, unwatched

if TYPE_CHECKING:
    from harness.greedy import GreedyCheck
    from harness.store import RunData
    from impl.engine.models import Models

ReferenceName = Literal["engine", "transformers-fp32"]


def certify_run(
    run: RunData,
    prompts: Mapping[str, Sequence[int]],
    models: Models,
    greedy: GreedyCheck,
    reference: ReferenceName = "engine",
    scored: Scored = unwatched,
) -> Certificate:
    """Scores every output and judges every method.

    Args:
        run: as read back.
        prompts: request id -> prompt ids.
        models: the pair that it ran on.
        greedy: its greedy outputs, compared.
        reference: our engine with a cache of its own, or the transformers model in float32.
        scored: told how many outputs have been scored, of how many.
    """
    draft = None if models.draft_folder is None else EngineLogits(models.draft())
    if reference == "engine":
        target: LogitSource = EngineLogits(models.target())
    else:
        target = TransformersLogits(models.target_folder)
    references = References(target, draft)
    return certify(run, prompts, references, greedy, reference_name=reference, scored=scored)
