"""Certifies a stored run on the models that it ran on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from harness.equivalence.certificate import Certificate, certify
from harness.equivalence.reference_scores import EngineLogits, References, TransformersLogits

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
) -> Certificate:
    """Scores every output and judges every method.

    Args:
        run: as read back; its measuring has ended, so all cores may be used.
        prompts: request id -> prompt ids.
        models: the pair that it ran on.
        greedy: its greedy outputs, compared.
        reference: our engine with a cache of its own, or the transformers model in float32.
    """
    with _all_cores():
        references = _references(models, reference)
        return certify(run, prompts, references, greedy, reference_name=reference)


def _references(models: Models, reference: ReferenceName) -> References:
    target = (
        EngineLogits(models.target())
        if reference == "engine"
        else TransformersLogits(models.target_folder)
    )
    draft = None if models.draft_folder is None else EngineLogits(models.draft())
    return References(target, draft)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Lifts the confinement to the target's cores for as long as nothing is timed."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
