"""One run from start to end: resolve what the config names, measure, store, verify the outputs.

Knows no method by name and takes no time itself: `harness.measure` does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import invariants, run_prompts
from harness.cache import default_cache_dir
from harness.config import RunConfig
from harness.decoder_pool import DecoderPool, Method
from harness.errors import StoreError, UsageError
from harness.execution import Execution, Failure
from harness.fingerprint import fingerprint, git_state, package_versions
from harness.greedy import GreedyCheck, check_greedy
from harness.interrupts import termination_as_interrupt
from harness.metrics import split_cells
from harness.pairs import (
    ResolvedModel,
    ResolvedPair,
    find_pair,
    local_pair,
    resolve,
)
from harness.progress import Progress
from harness.prompts import PromptSet
from harness.registry import decoder_class, decoder_options, registered_name
from harness.store import RunStore, Status, read_run
from harness.workload import Workload, make_workload

if TYPE_CHECKING:
    from harness.equivalence.certificate import Certificate
    from harness.equivalence.verify import ReferenceName
    from harness.pairs import Pair
    from impl.engine.models import Models, ModelSpec

UNPINNED = "the content is trusted as it was at its first use here"
INTERRUPTED = 130  # the shell's code for a process that SIGINT ended


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        directory: the run directory.
        status: as in the manifest.
        failures: cells that ended early.
        greedy: outputs compared with the autoregressive ones; None after an interrupt.
        certificate: of losslessness; None after an interrupt or where the run is not verified.
        faults: invariants that the stored rows break; none in a sound program.
    """

    directory: Path
    status: Status
    failures: tuple[Failure, ...]
    greedy: GreedyCheck | None
    certificate: Certificate | None
    faults: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when every cell was measured, all rows add up and no greedy output is wrong.

        130 after an interrupt.
        """
        if self.status == "interrupted":
            return INTERRUPTED
        wrong = self.greedy is not None and any(not d.tie for d in self.greedy.divergences)
        return 1 if wrong or self.faults or self.status == "failed" else 0


def run(config: RunConfig, out: Path, progress: Progress) -> RunSummary:
    """Measures what the config names and stores it.

    Args:
        config: the run.
        out: run directory; absent or empty.
        progress: told what happens; closed at the end.

    Raises:
        UsageError: unknown method, option, pair or dataset, cores or context that are not there,
            or no draft where a method needs one.
        HarnessError: models or prompts that cannot be had, or a directory that cannot be written.
            A failing method raises nothing: it is in the summary.
    """
    _refuse_used(out)
    methods = resolve_methods(config)
    pair = _named_pair(config)
    _check_drafts(methods, pair)
    _check_cores(config, methods)
    prompt_sets = run_prompts.prompt_sets(config)
    _warn_unpinned(prompt_sets, progress)
    with termination_as_interrupt():
        try:
            progress.note(f"loading {pair.name}")
            resolved = resolve(
                pair, default_cache_dir(config.cache_dir), progress=progress.download
            )
            return _measure(
                _fitted(config, resolved), out, progress, methods, resolved, prompt_sets
            )
        finally:
            progress.close()


def verify(
    directory: Path,
    progress: Progress,
    *,
    reference: ReferenceName = "engine",
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> Certificate:
    """Certifies a stored run, on this machine's copy of its models, and stores the certificate.

    Args:
        directory: the run directory.
        progress: told what happens; closed at the end.
        reference: what outputs are scored with.
        cache_dir: where weights are kept; None is the run's own place.
        data_dir: mirror folder of prompts; None is the run's own place.

    Raises:
        StoreError: no run directory, or weights or prompts that are no longer those of the run.
    """
    import torch

    from impl.engine import loader

    store = RunStore.open(directory)
    places = {"cache_dir": cache_dir, "data_dir": data_dir}
    given = {name: place for name, place in places.items() if place is not None}
    stored = {"split": "all", **store.manifest["config"]}  # what runs took before there were splits
    config = RunConfig.model_validate({**stored, **given})
    prompt_sets = run_prompts.prompt_sets(config)
    torch.set_num_threads(len(config.placement.target_cores))  # as the run had; more may spin
    try:
        cache = default_cache_dir(config.cache_dir)
        pair = resolve(_named_pair(config), cache, progress=progress.download)
        _check_same(store, pair, prompt_sets)
        eos = loader.eos_token_ids(pair.target.folder)
        workload = make_workload(config, run_prompts.encode(config, pair, prompt_sets), eos)
        models = _models(config, pair)
        greedy = _check_greedy(directory, workload, models)
        certificate = _certify(directory, workload, models, greedy, progress, reference)
    finally:
        progress.close()
    store.update(greedy=asdict(greedy), certificate=asdict(certificate))
    return certificate


def resolve_methods(config: RunConfig) -> dict[str, Method]:
    """The run's methods by name, their parameters validated.

    Raises:
        UsageError: unknown method, or an option that its method does not have.
        HarnessError: a method that cannot be imported.
    """
    for name in config.options:
        registered_name(name)  # also those that this run does not use
    return {
        name: Method(decoder_class(name), decoder_options(name, config.options.get(name, {})))
        for name in config.methods
    }


def _measure(
    config: RunConfig,
    out: Path,
    progress: Progress,
    methods: Mapping[str, Method],
    pair: ResolvedPair,
    prompt_sets: Mapping[str, PromptSet],
) -> RunSummary:
    from impl.engine import loader, placement

    machine = fingerprint(config.placement)  # before this process is confined to its cores
    placement.apply(config.placement.target_cores)
    eos = loader.eos_token_ids(pair.target.folder)
    workload = make_workload(config, run_prompts.encode(config, pair, prompt_sets), eos)
    models = _models(config, pair)
    store = RunStore.create(out, _manifest(config, machine, pair, models, prompt_sets, workload))
    pool = DecoderPool(methods, models, workload, config)
    execution = Execution(workload, pool, store, progress)
    status = execution.run()
    failures = tuple(execution.failures.values())
    if status == "interrupted":
        return RunSummary(out, status, failures, None, None)
    progress.note("comparing greedy outputs")
    greedy = _check_greedy(out, workload, models)
    store.update(greedy=asdict(greedy))
    certificate = _certify(out, workload, models, greedy, progress) if config.verify else None
    if certificate is not None:
        store.update(certificate=asdict(certificate))
    return RunSummary(out, status, failures, greedy, certificate, _broken_invariants(out))


def _broken_invariants(directory: Path) -> tuple[str, ...]:
    """The invariants that the rows of a stored run break, a line each."""
    stored = read_run(directory)
    cells = split_cells(stored.requests, stored.rounds)
    return tuple(invariants.faults(stored.requests, stored.rounds, cells))


def _certify(
    directory: Path,
    workload: Workload,
    models: Models,
    greedy: GreedyCheck,
    progress: Progress,
    reference: ReferenceName = "engine",
) -> Certificate:
    from harness.equivalence.verify import certify_run

    progress.note("verifying that outputs follow the target's distribution")
    return certify_run(read_run(directory), workload.prompt_ids(), models, greedy, reference)


def _check_same(store: RunStore, pair: ResolvedPair, prompts: Mapping[str, PromptSet]) -> None:
    """Raises `StoreError` unless weights and prompts are those that the run was made with."""
    manifest = store.manifest
    now = {"target": pair.target.sha256, **{name: found.sha256 for name, found in prompts.items()}}
    then = {
        "target": manifest["pair"]["target"]["sha256"],
        **{name: found["sha256"] for name, found in manifest["datasets"].items()},
    }
    changed = [name for name in then if now.get(name) != then[name]]
    if changed:
        raise StoreError(
            f"{store.directory}: {changed[0]} is no longer what the run was made with "
            f"(sha256 {then[changed[0]]}); measure it again"
        )


def _refuse_used(out: Path) -> None:
    """Before anything is loaded; the store checks again when it creates the directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out}: is not an empty directory; choose another --out")


def _named_pair(config: RunConfig) -> Pair:
    given = str(config.target)
    pair = find_pair(config.pair) if config.pair else local_pair(given, config.draft)
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


def _check_drafts(methods: Mapping[str, Method], pair: Pair) -> None:
    needy = [name for name, method in methods.items() if method.decoder.needs_draft]
    if needy and pair.draft is None:
        raise UsageError(
            f"methods: {', '.join(needy)} need a draft, and pair {pair.name} has none; "
            "choose another pair or give --draft"
        )


def _check_cores(config: RunConfig, methods: Mapping[str, Method]) -> None:
    from impl.engine import placement

    placement.check("target_cores", config.placement.target_cores)
    if any(method.decoder.asynchronous for method in methods.values()):
        placement.check("draft_cores", config.placement.draft_cores)


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
    from impl.engine.models import Models, ModelSpec

    kernels = default_cache_dir(config.cache_dir) / "kernels"
    target = ModelSpec(
        pair.target.folder, pair.target.dtype, kernel_dir=kernels, engine=config.engine
    )
    if pair.draft is None:
        return Models(target)
    draft = ModelSpec(
        pair.draft.folder,
        pair.draft.dtype,
        head_size=pair.draft_vocab,
        quantization=pair.draft_quantization,
        kernel_dir=kernels,
        vocab_limit=model_size(target.folder, "vocab_size"),
        engine=config.engine,
    )
    return Models(target, draft)


def _check_greedy(out: Path, workload: Workload, models: Models) -> GreedyCheck:
    from impl.engine.reference import Reference

    return check_greedy(read_run(out).requests, workload.prompt_ids(), Reference(models.target()))


def _manifest(
    config: RunConfig,
    machine: Mapping[str, Any],
    pair: ResolvedPair,
    models: Models,
    prompt_sets: Mapping[str, PromptSet],
    workload: Workload,
) -> dict[str, Any]:
    """What is known before anything is measured (docs/run-directory.md)."""
    return {
        "command": list(sys.argv),
        "config": config.model_dump(mode="json"),
        "fingerprint": machine,
        "git": git_state(Path(__file__).parents[1])._asdict(),
        "packages": package_versions(),
        "pair": {
            "name": pair.name,
            "engine": config.engine,
            "target": _model_entry(pair.target, models.target_spec),
            "draft": None if pair.draft is None else _model_entry(pair.draft, models.draft_spec),
            "draft_vocab": pair.draft_vocab,
            "draft_quantization": pair.draft_quantization,
        },
        "datasets": {name: _dataset_entry(prompts) for name, prompts in prompt_sets.items()},
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
        "operators": operators,
        "why_not_kernels": why_not_kernels,
    }


def _dataset_entry(prompts: PromptSet) -> dict[str, Any]:
    return {
        "sha256": prompts.sha256,
        "source": prompts.source,
        "pinned": prompts.pinned,
        "prompts": len(prompts.prompts),
        "licence": prompts.licence,
    }
