"""What two runs do not have in common: machines, settings, weights, prompts, revision, packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import fingerprint, invariants
from harness.config import UNMEASURED
from harness.errors import StoreError
from harness.fingerprint import differences
from harness.metrics import CellData, split_cells
from harness.plan import Cell

if TYPE_CHECKING:
    from harness.store import RunData

# What a config may differ in without anything to say; lists show as cells.
_SILENT = (*UNMEASURED, "methods", "datasets", "temperatures", "batch_sizes", "options")
_PROMPT_FIELDS = ("raw", "system")


class ComparedRun(NamedTuple):
    """One of the runs: what it is called, its manifest and its cells."""

    name: str
    manifest: Mapping[str, Any]
    cells: Mapping[Cell, CellData]

    @classmethod
    def of(cls, name: str, run: RunData) -> ComparedRun:
        """From a stored run; raises `StoreError` where its rows do not add up."""
        cells = split_cells(run.requests, run.rounds)
        if faults := invariants.faults(run.requests, run.rounds, cells):
            raise StoreError(f"{name}: its rows do not add up: {faults[0]}")
        return cls(name, run.manifest, {data.cell: data for data in cells})


def same_prompts(base: ComparedRun, new: ComparedRun, dataset: str) -> bool:
    """Whether a prompt index means the same token ids in both runs."""
    return all(
        _identity(base.manifest, dataset)[name] == value
        for name, value in _identity(new.manifest, dataset).items()
    )


def _identity(manifest: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    config = manifest.get("config", {})
    return {
        "prompts": manifest.get("datasets", {}).get(dataset, {}).get("sha256"),
        "target": _weights(manifest, "target"),
        **{name: config.get(name) for name in _PROMPT_FIELDS},
    }


def _weights(manifest: Mapping[str, Any], model: str) -> str | None:
    entry = manifest.get("pair", {}).get(model) or {}
    return entry.get("sha256")


def machine_differences(base: ComparedRun, new: ComparedRun) -> list[str]:
    """Fields of the machines' identity, a line each."""
    machines = (run.manifest.get("fingerprint", {}) for run in (base, new))
    return fingerprint.machine_differences(*machines)


def run_differences(base: ComparedRun, new: ComparedRun) -> Iterable[str]:
    """What one run has and the other has not, and what the same names stand for in each."""
    yield from plan_differences(base, new)
    yield from software_differences(base, new)


def plan_differences(base: ComparedRun, new: ComparedRun) -> Iterable[str]:
    """In what was measured: cells, settings, weights, options and prompts, a line each."""
    for here, there in ((base, new), (new, base)):
        for cell in here.cells:
            if cell not in there.cells:
                yield f"only in {here.name}: {cell.id}"
    settings = [run.manifest.get("config", {}) for run in (base, new)]
    told = [{k: v for k, v in config.items() if k not in _SILENT} for config in settings]
    yield from (f"config {line}" for line in differences(*told))
    for model in ("target", "draft"):
        if _weights(base.manifest, model) != _weights(new.manifest, model):
            yield f"the {model}'s weights"
    yield from _option_differences(base, new)
    yield from _prompt_differences(base, new)


def software_differences(base: ComparedRun, new: ComparedRun) -> Iterable[str]:
    """In what measured it: revision and packages, a line each."""
    git = [run.manifest.get("git", {}).get("revision") for run in (base, new)]
    if git[0] != git[1]:
        yield f"revision: {git[0]} and {git[1]}"
    changed = differences(base.manifest.get("packages", {}), new.manifest.get("packages", {}))
    if changed:
        yield f"packages: {changed[0]}{and_more(changed)}"


def _option_differences(base: ComparedRun, new: ComparedRun) -> Iterable[str]:
    decoders = [run.manifest.get("decoders", {}) for run in (base, new)]
    for cell in decoders[0].keys() & decoders[1].keys():
        options = [own[cell].get("options", {}) for own in decoders]
        yield from (f"{cell} {line}" for line in differences(*options))


def _prompt_differences(base: ComparedRun, new: ComparedRun) -> Iterable[str]:
    """By dataset: prompts that are others, or that only one of the runs decoded."""
    for dataset in dict.fromkeys(cell.dataset for cell in base.cells if cell in new.cells):
        before, after = (_prompt_indices(run, dataset) for run in (base, new))
        if not same_prompts(base, new, dataset):
            yield f"{dataset}: other prompts in each run, so its cells do not pair"
        elif before != after:
            count = len(before & after)
            yield f"{dataset}: {count} prompts in common, of {len(before)} and {len(after)}"


def _prompt_indices(run: ComparedRun, dataset: str) -> set[int]:
    own = [data for cell, data in run.cells.items() if cell.dataset == dataset]
    return {int(index) for data in own for index in data.requests["prompt_index"]}


def and_more(lines: Sequence[str]) -> str:
    """What follows the first line in its place."""
    return f" and {len(lines) - 1} more" if len(lines) > 1 else ""
