"""A run in one JSON object: cells, checks, warnings. `harness show --json` prints it.

The names in it are fixed: scripts depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.checks import run_checks, verified
from harness.contention import contention, timing_was_disturbed
from harness.energy import cell_energy
from harness.equivalence.content import count_content
from harness.labels import emulated_devices, synthetic_parts
from harness.metrics import CellData, cell_metrics, split_cells
from harness.noise import cell_noise, disturbances
from harness.plan import BASELINE, Cell
from harness.prediction import predict_cell
from harness.speedup import speedup

if TYPE_CHECKING:
    from harness.store import RunData

SCHEMA = 1
BASELINES = (BASELINE, "sd")

_FEW_PROMPTS = 10  # bootstrap intervals from fewer are markedly too narrow


def summarise(run: RunData) -> dict[str, Any]:
    """Everything that a run says, derived from its directory; JSON values only.

    Speedups are over `ar` and `sd` where the run has them, on the same dataset, temperature and
    batch size; a cell is not compared with itself, nor the A/A control with anything but `ar`.
    A degraded cell, whose draft failed so that the target went on alone, is not compared at all.
    """
    cells = split_cells(run.requests, run.rounds)
    by_cell = {data.cell: data for data in cells}
    return {
        "schema": SCHEMA,
        "cells": [_cell(data, by_cell, run) for data in cells],
        "checks": [check.to_json() for check in run_checks(run, cells)],
        "warnings": list(_warnings(run, cells)),
    }


def _cell(data: CellData, by_cell: Mapping[Cell, CellData], run: RunData) -> dict[str, Any]:
    cell, manifest = data.cell, run.manifest
    decoder = manifest.get("decoders", {}).get(cell.id, {})
    devices, diagnostics = decoder.get("devices"), decoder.get("diagnostics", {})
    degraded = diagnostics.get("degraded")
    others = () if degraded else baselines_of(cell)
    baselines = [by_cell[other] for other in others if other in by_cell]
    prediction, slowdown = predict_cell(data.rounds), contention(diagnostics)
    emulated = emulated_devices(manifest)
    energy = None if emulated else cell_energy(data, run.conditions)  # a sleeping small pair's
    return {
        "method": cell.method,
        "control": cell.control,
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "verified": verified(manifest, cell),
        "degraded": degraded,
        "untuned": _untuned(decoder),
        "automatic": _automatic(decoder),
        "placement": placement_convention(manifest),
        "emulated": emulated,
        "synthetic": synthetic_parts(manifest),
        **asdict(cell_metrics(data, devices)),
        "prediction": asdict(prediction) if prediction else None,
        "contention": asdict(slowdown) if slowdown else None,
        "energy": asdict(energy) if energy else None,
        "speedup": _speedups(data, baselines),
        "categories": _categories(data, baselines, devices),
    }


def placement_convention(manifest: Mapping[str, Any]) -> str:
    """Which cores synchronous methods had: `equal-target` or `pooled`."""
    placement = manifest.get("fingerprint", {}).get("placement", {})
    return str(placement.get("convention", "equal-target"))  # runs from before there was another


def baselines_of(cell: Cell) -> Iterable[Cell]:
    """The cells that a cell's speedups are over, where a run has them."""
    for method in BASELINES[:1] if cell.control else BASELINES:
        other = Cell(method, cell.dataset, cell.temperature, cell.batch_size)
        if other != cell:
            yield other


def _speedups(data: CellData, baselines: Iterable[CellData]) -> dict[str, Any]:
    return {other.cell.method: asdict(speedup(data, other)) for other in baselines}


def _categories(
    data: CellData, baselines: Sequence[CellData], devices: int | None
) -> dict[str, Any]:
    """The figures and speedups by category; empty where the dataset has only one."""
    names = sorted(data.requests["category"].unique())
    if len(names) < 2:
        return {}
    found = {}
    for name in names:
        own = data.only(name)
        found[name] = {
            **asdict(cell_metrics(own, devices)),
            "speedup": _speedups(own, [other.only(name) for other in baselines]),
        }
    return found


def _warnings(run: RunData, cells: Sequence[CellData]) -> Iterable[str]:
    yield from run.problems
    yield from _completeness_warnings(run)
    yield from _degraded_warnings(run.manifest)
    yield from _timing_warnings(run.manifest)
    yield from _machine_warnings(run.manifest)
    yield from (found.sentence for found in disturbances(cell_noise(run.conditions)))
    yield from _tuning_warnings(run.manifest)
    yield from _pin_warnings(run.manifest)
    yield from _prompt_warnings(cells)
    yield from _output_warnings(run)


def _completeness_warnings(run: RunData) -> Iterable[str]:
    status, failures = run.manifest["status"], run.manifest.get("failures", ())
    items: dict[str, list[str]] = {}  # by what they failed of
    if status != "finished":
        yield f"the run is {status}: the figures cover the items measured so far"
    for failure in failures:
        items.setdefault(f"{failure['error']}: {failure['message']}", []).append(failure["item"])
    for reason, (first, *others) in items.items():
        more = f" and {len(others)} more item{'s' * (len(others) > 1)}" if others else ""
        yield f"{first}{more} failed: {reason}"
    skipped = run.manifest.get("skipped_requests", ())
    if skipped:
        first = f"{skipped[0]['request_id']}: {skipped[0]['reason']}"
        yield f"{len(skipped)} requests were skipped; the first: {first}"


def _degraded_warnings(manifest: Mapping[str, Any]) -> Iterable[str]:
    for cell, decoder in manifest.get("decoders", {}).items():
        if reason := decoder.get("diagnostics", {}).get("degraded"):
            yield f"{cell} is degraded, the target went on alone and no speedup is told: {reason}"


def _timing_warnings(manifest: Mapping[str, Any]) -> Iterable[str]:
    for cell, decoder in manifest.get("decoders", {}).items():
        if timing_was_disturbed(decoder.get("diagnostics", {})):
            yield (
                f"{cell} planned by pass times that something had disturbed: its verifications "
                f"took {decoder['diagnostics']['verify_over_timed']:.0%} of them; measure again"
            )


def _machine_warnings(manifest: Mapping[str, Any]) -> Iterable[str]:
    fingerprint = manifest.get("fingerprint", {})
    if emulated := emulated_devices(manifest):
        yield f"EMULATED, no measurement of that hardware: passes were made to last as {emulated}"
    if synthetic := synthetic_parts(manifest):
        yield f"SYNTHETIC, no measurement of these models: {synthetic} (docs/synthetic.md)"
    if (placement := fingerprint.get("placement", {})).get("shared"):
        device = placement.get("draft_device", "cpu")
        shared = "cores" if device.startswith("cpu") else device
        yield f"target and draft share {shared}: asynchronous methods are slower than they could be"
    load = fingerprint.get("load_average")
    cores = fingerprint.get("cpu", {}).get("cores_available")
    if load is not None and cores is not None and load > cores / 2:
        yield f"load average {load} on {cores} cores at the start: other programs were running"
    git = manifest.get("git", {})
    if git.get("dirty"):
        named = f" (diff {git['diff_sha256'][:12]})" if git.get("diff_sha256") else ""
        yield f"the source tree had uncommitted changes{named}"


def _tuning_warnings(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Methods with parameters that neither a tuning run nor a person has chosen, and why."""
    decoders = manifest.get("decoders", {})
    untuned = {cell.partition("/")[0] for cell in decoders if _untuned(decoders[cell])}
    unused = manifest.get("tuning", {}).get("unused", ())
    for method in sorted(untuned):
        reasons = [line for line in unused if line.partition(" ")[0] == method]
        told = f": {'; '.join(reasons)}" if reasons else ""
        yield f"{method} ran with default parameters, not tuned for this pair and machine{told}"


def _untuned(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder had parameters to tune and ran on its defaults, fixed ones."""
    return _on_defaults(decoder) and not _automatic(decoder)


def _automatic(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder ran on defaults that leave the choice to the method itself."""
    return _on_defaults(decoder) and decoder.get("automatic", False)


def _on_defaults(decoder: Mapping[str, Any]) -> bool:
    return bool(decoder.get("options")) and decoder.get("tuned", False) is False


def _pin_warnings(manifest: Mapping[str, Any]) -> Iterable[str]:
    for name, dataset in manifest.get("datasets", {}).items():
        if dataset.get("pinned") is False:
            yield f"dataset {name} is unpinned: its content is trusted as it was at its first use"
    for role in ("target", "draft"):
        if ((manifest.get("pair") or {}).get(role) or {}).get("pinned") is False:
            yield f"the {role} is unpinned: its weights are trusted as they were at their first use"


def _prompt_warnings(cells: Sequence[CellData]) -> Iterable[str]:
    """A line for what one setting or more have; the methods of a setting share their prompts."""
    groups: dict[Cell, list[CellData]] = {}
    for data in cells:
        groups.setdefault(data.cell.group, []).append(data)
    found: dict[str, list[Cell]] = {}
    for cell, own in groups.items():
        for warning in _setting_warnings(cell, own):
            found.setdefault(warning, []).append(cell)
    for warning, (first, *others) in found.items():
        where = f"{first.dataset} at temperature {first.temperature:g}"
        more = f" and {len(others)} more setting{'s' * (len(others) > 1)}" if others else ""
        yield f"{where}, batch size {first.batch_size}{more}: {warning}"


def _setting_warnings(setting: Cell, cells: Sequence[CellData]) -> Iterable[str]:
    count = max(data.requests["prompt_index"].nunique() for data in cells)
    prompts = f"{count} prompt{'s' * (count != 1)}"
    if count < _FEW_PROMPTS:
        yield f"{prompts}; intervals from fewer than {_FEW_PROMPTS} mislead"
    if count < setting.batch_size:
        yield f"{prompts} never fill the batch"
    if not any(data.cell.control for data in cells):
        yield "no A/A control, so the noise of this machine is unknown"


def _output_warnings(run: RunData) -> Iterable[str]:
    if synthetic_parts(run.manifest):
        return
    ends = run.manifest.get("stop_token_ids", ())
    for (dataset, temperature), own in run.requests.groupby(["dataset", "temperature"]):
        where = f"{dataset} at temperature {temperature:g}"
        counts = count_content(own["output_ids"], own["finish"], ends)
        for count, told in (
            (counts.loops, "end in a loop, which flatters acceptance"),
            (counts.empty, "are empty"),
            (counts.after_eos, "go on after an end-of-sequence token"),
            (counts.cut_at_length, "were cut at max_new_tokens"),
            (counts.cut_at_context, "were cut at the context"),
        ):
            if count:
                yield f"{where}: {count} of {counts.outputs} outputs {told}"
