"""Judges a stored run's outputs: greedy ones against AR's, all of them under a clean reference."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from harness.decoder import Placement
from harness.greedy import GreedyCheck, check_greedy, methods_with_own_kernels
from harness.preparation import Prepared
from harness.progress import Progress
from harness.store import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.equivalence.certificate import Certificate
    from harness.equivalence.verify import ReferenceName
    from harness.store import RunData
    from impl.engine.models import Models


@dataclass(frozen=True, slots=True)
class Verification:
    """What a run's outputs say.

    Attributes:
        greedy: outputs compared with the autoregressive ones.
        certificate: of losslessness; None where the run is not to be verified.
    """

    greedy: GreedyCheck
    certificate: Certificate | None

    def record(self) -> dict[str, Any]:
        """What the manifest keeps."""
        certificate = {} if self.certificate is None else {"certificate": asdict(self.certificate)}
        return {"greedy": asdict(self.greedy), **certificate}

    @classmethod
    def from_record(cls, manifest: Mapping[str, Any]) -> Self | None:
        """Of a manifest; None where a run was not verified, or not as its config says.

        Strict JSON has no infinity, so that one in the certificate cannot be read back: None too.
        """
        from pydantic import TypeAdapter, ValidationError

        from harness.equivalence.certificate import Certificate

        greedy, certificate = manifest.get("greedy"), manifest.get("certificate")
        if greedy is None or (certificate is None and manifest["config"]["verify"]):
            return None
        try:
            return cls(
                TypeAdapter(GreedyCheck).validate_python(greedy),
                certificate and TypeAdapter(Certificate).validate_python(certificate),
            )
        except ValidationError:
            return None


def verify_outputs(
    directory: Path, prepared: Prepared, models: Models, progress: Progress
) -> Verification:
    """Reads a run back and judges every output as its config says.

    Args:
        directory: the run directory.
        prepared: what it was made from.
        models: its models.
        progress: told what happens.
    """
    run, prompts = read_run(directory), prepared.workload().prompt_ids()
    greedy = compare_greedy(run, prompts, models, progress)
    if not prepared.config.verify:
        return Verification(greedy, None)
    return Verification(greedy, certify_outputs(run, prompts, models, greedy, progress))


def verifying_cores(placement: Placement) -> tuple[int, ...]:
    """The target's cores and those of the draft's that this process has: nothing is timed here.

    Our kernels give the same bits on any number of threads.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    draft = (core for core in placement.draft_cores if core in own)
    return tuple(dict.fromkeys((*placement.rank_cores(0), *draft)))


def compare_greedy(
    run: RunData, prompts: Mapping[str, Sequence[int]], models: Models, progress: Progress
) -> GreedyCheck:
    """Compares greedy outputs with AR's; where they part the target says whether it is a tie."""
    from impl.engine.reference import Reference

    progress.note("comparing greedy outputs")
    reference = Reference(models.target, replace(models.target_spec, dtype="float32").load)
    own_kernels = methods_with_own_kernels(run.manifest)
    return check_greedy(run.requests, prompts, reference, own_kernels)


def certify_outputs(
    run: RunData,
    prompts: Mapping[str, Sequence[int]],
    models: Models,
    greedy: GreedyCheck,
    progress: Progress,
    reference: ReferenceName = "engine",
) -> Certificate:
    """Scores every output with a clean reference and judges every method."""
    from harness.equivalence.verify import certify_run

    progress.note("verifying that outputs follow the target's distribution")
    return certify_run(run, prompts, models, greedy, reference, partial(progress.count, "outputs"))
