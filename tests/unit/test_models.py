"""Where the models of a pair are: the meta device stands in for a GPU."""

from pathlib import Path

import harness
from impl.engine.models import Models, ModelSpec

TINY = Path(harness.__file__).parent / "tiny"
META = ModelSpec(TINY / "target", "float32", device="meta")


def test_a_synchronous_methods_draft_is_on_the_targets_device_and_the_workers_is_not() -> None:
    models = Models(META, ModelSpec(TINY / "draft", "float32"))
    draft = models.draft()
    assert (models.target().device.type, draft.device.type) == ("meta", "meta")
    assert draft.new_cache(1, 8).memory.device.type == "meta"
    assert models.draft_spec.device == "cpu"
    assert models.draft() is draft


def test_a_model_on_a_gpu_says_why_it_has_no_cpu_kernels() -> None:
    operators, reason = META.execution()
    assert operators.startswith(("gpu-sdpa", "gpu-flash-attn"))
    assert reason == "they are for CPUs, not meta"
