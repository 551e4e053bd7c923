"""What a config names, found and checked: methods, models, prompts as token ids, the plan.

Everything that measures or verifies a run starts from a `Prepared`. Nothing is loaded here but
tokenizers, so that a run that cannot be made is refused within seconds; only conversations of
several turns need the target, which writes their earlier answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import run_prompts, synthetic
from harness.cache import default_cache_dir
from harness.config import RunConfig
from harness.decoder_pool import Method
from harness.encoding import EncodedPrompt, ids_sha256
from harness.errors import UsageError
from harness.fingerprint import fingerprint, lacks_accelerator, package_versions
from harness.pairs import (
    ResolvedModel,
    ResolvedPair,
    find_pair,
    local_pair,
    resolve,
)
from harness.progress import Progress
from harness.prompts import PromptSet
from harness.random_pair import check_memory, make_up
from harness.registry import decoder_class, decoder_options, registered_name
from harness.simulation.emulation import emulated_profile, latencies
from harness.source_tree import git_state
from harness.workload import Workload, make_workload

if TYPE_CHECKING:
    from harness.pairs import Pair
    from impl.engine.models import Models, ModelSpec

UNPINNED = "the content is trusted as it was at its first use here"


@dataclass(frozen=True)
class Prepared:
    """A run that can be made, in values that another process can be told as JSON.

    Attributes:
        config: the run; its context fits the models.
        pair: the models, on this machine.
        prompts: dataset -> its prompts in the order in which they are run.
        prompt_hashes: `Prompt.sha256` of each of them.
        eos_token_ids: ids that end a generation.
        record: what the manifest says of it (docs/run-directory.md).
    """

    config: RunConfig
    pair: ResolvedPair
    prompts: dict[str, tuple[EncodedPrompt, ...]]
    prompt_hashes: frozenset[str]
    eos_token_ids: frozenset[int]
    record: dict[str, Any]

    def workload(self) -> Workload:
        """The plan and the requests of each work item."""
        return make_workload(self.config, self.prompts, self.eos_token_ids)

    def models(self) -> Models:
        """The pair's models, each loaded when it is first asked for."""
        return _models(self.config, self.pair)


def resolve_methods(config: RunConfig) -> dict[str, Method]:
    """The run's methods by name, their parameters validated.

    Raises:
        UsageError: unknown method, or an option that its method does not have.
        HarnessError: a method that cannot be imported.
    """
    for name in config.options:
        registered_name(name)  # also those that this run does not use
    return {
        name: Method(
            decoder_class(name),
            decoder_options(name, given := config.options.get(name, {})),
            frozenset(given),
        )
        for name in config.methods
    }


def check_methods(config: RunConfig) -> None:
    """Raises `UsageError` unless the methods exist, with a draft and the devices that they need."""
    from impl.engine import placement

    if config.devices:
        emulated_profile(config.devices)
    methods = resolve_methods(config)
    synthetic.check(config, methods)
    pair = named_pair(config)
    needy = [name for name, method in methods.items() if method.decoder.needs_draft]
    if needy and pair.draft is None:
        raise UsageError(
            f"methods: {', '.join(needy)} need a draft, and pair {pair.name} has none; "
            "choose another pair or give --draft"
        )
    where = config.placement
    placement.check("target_cores", where.target_cores)
    placement.check_devices("target_devices", where.target_devices)
    pooled = where.convention == "pooled"
    if pooled or any(method.decoder.asynchronous for method in methods.values()):
        placement.check("draft_cores", where.draft_cores)
        placement.check_devices("draft_device", where.draft_devices)


def check_machine(config: RunConfig) -> None:
    """Raises `UsageError` unless this machine has the GPUs that the config requires."""
    if config.require_accelerator is None:
        return
    reason = lacks_accelerator(fingerprint(config.placement), config.require_accelerator)
    if reason:
        raise UsageError(reason)


def prepare(
    config: RunConfig,
    progress: Progress,
    stored: dict[str, tuple[EncodedPrompt, ...]] | None = None,
) -> Prepared:
    """Brings models and prompts to this machine and plans the run.

    Args:
        config: the run.
        progress: told what happens.
        stored: the prompts of a run that was made already; None encodes them.

    Raises:
        UsageError: unknown pair or dataset, or a context that the models have no positions for.
        HarnessError: models or prompts that cannot be had.
    """
    from impl.engine import loader

    pair = named_pair(config)
    prompt_sets = run_prompts.prompt_sets(config)
    _warn_unpinned(prompt_sets, progress)
    progress.note(f"loading {pair.name}")
    cache_dir = default_cache_dir(config.cache_dir)
    if config.weights == "random":
        resolved = make_up(pair, cache_dir)
    else:
        resolved = resolve(pair, cache_dir, progress=progress.download)
    config = _fitted(config, resolved)
    if config.weights == "random":
        check_memory(resolved, config.max_context, max(config.batch_sizes), config.placement)
    eos = frozenset() if config.acceptance else loader.eos_token_ids(resolved.target.folder)
    prompts = stored or run_prompts.encode(
        config, prompt_sets, _models(config, resolved), eos, progress
    )
    workload = make_workload(config, prompts, eos)
    record = _record(config, resolved, prompt_sets, workload)
    hashes = frozenset(p.sha256 for found in prompt_sets.values() for p in found.prompts)
    return Prepared(config, resolved, prompts, hashes, eos, record)


def identity(config: RunConfig) -> dict[str, Any]:
    """Which program on which machine, for the manifest; of this process before it is confined."""
    return {
        "fingerprint": fingerprint(config.placement) | _unreal(config),
        "git": git_state(Path(__file__).parents[1])._asdict(),
        "packages": package_versions(),
    }


def _unreal(config: RunConfig) -> dict[str, Any]:
    """What makes a machine of its own, never compared with a real one (`harness.labels`)."""
    told = {"emulated": config.devices, "synthetic": synthetic.describe(config)}
    return {name: value for name, value in told.items() if value is not None}


def to_json(prepared: Prepared) -> dict[str, Any]:
    """In JSON values, for another process."""
    from pydantic import TypeAdapter

    return dict(TypeAdapter(Prepared).dump_python(prepared, mode="json"))


def from_json(values: Mapping[str, Any]) -> Prepared:
    """What `to_json` gave."""
    from pydantic import TypeAdapter

    return TypeAdapter(Prepared).validate_python(values)


def named_pair(config: RunConfig) -> Pair:
    """The pair that the config names or describes, with the config's changes to it."""
    if config.pair:
        pair = find_pair(config.pair, config.pairs_file)
    else:
        pair = local_pair(str(config.target), config.draft)
    changes: dict[str, Any] = {}
    if config.dtype is not None:
        changes["dtype"] = config.dtype
    if config.draft_vocab is not None:
        changes["draft_vocab"] = config.draft_vocab or None
    if config.engine == "hf":
        changes["draft_quantization"] = None  # the lean engine's
    if config.draft_quantization is not None:
        none = config.draft_quantization == "none"
        changes["draft_quantization"] = None if none else config.draft_quantization
    return pair.model_copy(update=changes)


def _warn_unpinned(prompt_sets: Mapping[str, PromptSet], progress: Progress) -> None:
    for name, prompts in prompt_sets.items():
        if not prompts.pinned:
            progress.note(f"warning: dataset {name} is unpinned ({prompts.source}): {UNPINNED}")


def _fitted(config: RunConfig, pair: ResolvedPair) -> RunConfig:
    """The config with its context fitted to the models."""
    from impl.engine import loader

    folders = [model.folder for model in (pair.target, pair.draft) if model is not None]
    positions = min(loader.model_size(folder, "max_position_embeddings") for folder in folders)
    if config.max_context <= positions:
        return config
    if "max_context" in config.model_fields_set:
        raise UsageError(f"max_context: must be <= {positions}, the positions of pair {pair.name}")
    return config.model_copy(update={"max_context": positions})


def _models(config: RunConfig, pair: ResolvedPair) -> Models:
    """The pair's models; a draft that is padded beyond its target never proposes the padding."""
    from impl.engine.loader import model_size
    from impl.engine.models import Models, ModelSpec, RankPlace

    where = config.placement
    kernels = default_cache_dir(config.cache_dir) / "kernels"
    emulated = latencies(config.devices, max(config.batch_sizes)) if config.devices else None
    target = ModelSpec(
        pair.target.folder,
        pair.target.dtype,
        kernel_dir=kernels,
        engine=config.engine,
        latency=emulated.target if emulated else None,
        device=where.target_devices[0],
        other_ranks=tuple(
            RankPlace(device, where.rank_cores(rank))
            for rank, device in enumerate(where.target_devices[1:], start=1)
        ),
        random=config.weights == "random",
    )
    if pair.draft is None:
        return Models(*synthetic.with_coin(config, target, None))
    draft = ModelSpec(
        pair.draft.folder,
        pair.draft.dtype,
        head_size=pair.draft_vocab,
        quantization=pair.draft_quantization,
        kernel_dir=kernels,
        vocab_limit=model_size(target.folder, "vocab_size"),
        engine=config.engine,
        latency=emulated.draft if emulated else None,
        device=where.draft_devices[0],
        random=config.weights == "random",
    )
    return Models(*synthetic.with_coin(config, target, draft))


def _record(
    config: RunConfig,
    pair: ResolvedPair,
    prompt_sets: Mapping[str, PromptSet],
    workload: Workload,
) -> dict[str, Any]:
    models = _models(config, pair)
    return {
        "config": config.model_dump(mode="json"),
        "pair": {
            "name": pair.name,
            "engine": config.engine,
            "target": _model_entry(pair.target, models.target_spec),
            "draft": None if pair.draft is None else _model_entry(pair.draft, models.draft_spec),
            "draft_vocab": pair.draft_vocab,
            "draft_quantization": pair.draft_quantization,
        },
        "datasets": {
            name: _dataset_entry(found, ids_sha256(workload.prompts[name].values()))
            for name, found in prompt_sets.items()
        },
        "seeds": {"run": config.seed},
        "plan": [item.id for item in workload.plan],
        "stop_token_ids": sorted(workload.eos_token_ids),
    }


def _model_entry(model: ResolvedModel, spec: ModelSpec) -> dict[str, Any]:
    operators, why_not_kernels = spec.execution()
    return {
        "source": model.source,
        "sha256": model.sha256,
        "dtype": model.dtype,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "pinned": model.pinned,
        "operators": operators,
        "why_not_kernels": why_not_kernels,
    }


def _dataset_entry(prompts: PromptSet, ids: str) -> dict[str, Any]:
    return {
        "sha256": prompts.sha256,
        "ids_sha256": ids,
        "source": prompts.source,
        "pinned": prompts.pinned,
        "prompts": len(prompts.prompts),
        "licence": prompts.licence,
    }
