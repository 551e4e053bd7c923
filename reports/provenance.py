"""Where a run's numbers come from: machine, software, weights, data and the command, as text.

Everything is taken from the manifest; what an incomplete manifest lacks is left out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.energy import EMULATED, UNKNOWN
from harness.labels import emulated_devices, label
from harness.summary import placement_convention

if TYPE_CHECKING:
    from reports.results import RunResult


class Source(NamedTuple):
    """Weights or prompts, and the sum that pins them."""

    name: str
    summary: str
    sha256: str | None


class Fact(NamedTuple):
    """A named property of the machine or its software."""

    name: str
    value: str


class Block(NamedTuple):
    """Text of the manifest that is folded away until asked for."""

    title: str
    text: str


def pair_name(manifest: Mapping[str, Any]) -> str:
    """The pair's name, or the target's source where the run named no pair; what of it is unreal."""
    pair = _mapping(manifest, "pair")
    name = str(pair.get("name") or _mapping(pair, "target").get("source") or "unnamed pair")
    return _joined(name, label(manifest))


def machine_name(manifest: Mapping[str, Any]) -> str:
    """The GPUs, or else the CPU and how many cores of it the run could use."""
    fingerprint = _mapping(manifest, "fingerprint")
    gpus = [str(gpu.get("name")) for gpu in fingerprint.get("gpus") or ()]
    if gpus:
        counts = {name: gpus.count(name) for name in gpus}
        return ", ".join(f"{count} x {name}" for name, count in counts.items())
    cpu = _mapping(fingerprint, "cpu")
    cores = cpu.get("cores_available")
    return str(cpu.get("model") or "unknown machine") + (f", {cores} cores" if cores else "")


def revision(manifest: Mapping[str, Any]) -> str:
    """The git revision, short, and whether the tree had changes that are in no commit."""
    git = _mapping(manifest, "git")
    if not git.get("revision"):
        return "revision unknown"
    return " ".join(filter(None, (f"revision {str(git['revision'])[:12]}", _changes(git))))


def date(manifest: Mapping[str, Any]) -> str:
    """The day on which the run was started (UTC)."""
    return str(manifest.get("created") or "date unknown")[:10]


def headline(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Machine, placement, date, revision and, unless it finished, the status."""
    status = str(manifest.get("status"))
    ended = () if status == "finished" else (f"status: {status}",)
    placement = f"{placement_convention(manifest)} placement"
    return (machine_name(manifest), placement, date(manifest), revision(manifest), *ended)


def command(manifest: Mapping[str, Any]) -> str:
    """The command line that made the run, quoted for a shell."""
    argv = manifest.get("command") or ()
    return argv if isinstance(argv, str) else shlex.join(map(str, argv))


def sources(manifest: Mapping[str, Any]) -> Iterator[Source]:
    """Target, draft and every dataset."""
    pair = _mapping(manifest, "pair")
    for role in ("target", "draft"):
        if model := _mapping(pair, role):
            yield Source(role, _model_summary(model), model.get("sha256"))
    for name, dataset in _mapping(manifest, "datasets").items():
        parts = (dataset.get("source"), _count(dataset.get("prompts"), "prompts"))
        licence = dataset.get("licence")
        summary = _joined(*parts, f"licence {licence}" if licence else None)
        yield Source(f"dataset {name}", summary, dataset.get("sha256"))


def facts(manifest: Mapping[str, Any]) -> Iterator[Fact]:
    """The machine and its software, a line each."""
    fingerprint, git = _mapping(manifest, "fingerprint"), _mapping(manifest, "git")
    cpu, system = _mapping(fingerprint, "cpu"), _mapping(fingerprint, "system")
    torch, placement = _mapping(fingerprint, "torch"), _mapping(fingerprint, "placement")
    memory = fingerprint.get("memory_bytes")
    packages = _mapping(manifest, "packages")
    known = {
        "machine": machine_name(manifest),
        "instructions": " ".join(cpu.get("flags") or ()),
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "",
        "system": _joined(system.get("os"), system.get("kernel"), sep=" "),
        "devices": _placement(placement),
        "python": fingerprint.get("python"),
        "torch": torch.get("version") or packages.get("torch"),
        "transformers": packages.get("transformers"),
        "git revision": _joined(git.get("revision"), _changes(git)),
        "started": manifest.get("created"),
        "ended": manifest.get("ended"),
    }
    return (Fact(name, str(value)) for name, value in known.items() if value)


def energy_fact(result: RunResult, manifest: Mapping[str, Any]) -> Fact:
    """What energy was counted of, or why none was."""
    sources = [cell.energy.sources for cell in result.cells if cell.energy]
    told = ", ".join(dict.fromkeys(source for found in sources for source in found))
    unknown = EMULATED if emulated_devices(manifest) else UNKNOWN
    return Fact("energy", f"of {told}" if told else unknown)


def blocks(manifest: Mapping[str, Any]) -> Iterator[Block]:
    """Configuration, seeds, decoders and packages in full."""
    titles = {
        "config": "Configuration",
        "seeds": "Seeds",
        "decoders": "Options and diagnostics of every decoder",
        "fingerprint": "Fingerprint of the machine",
        "pair": "Target and draft",
        "datasets": "Datasets",
    }
    for field, title in titles.items():
        if value := manifest.get(field):
            yield Block(title, json.dumps(value, indent=2, ensure_ascii=False))
    if packages := _mapping(manifest, "packages"):
        lines = (f"{name}=={version}" for name, version in packages.items())
        yield Block(f"Packages ({len(packages)})", "\n".join(lines))


def _model_summary(model: Mapping[str, Any]) -> str:
    parameters, weight_bytes = model.get("parameters"), model.get("weight_bytes")
    return _joined(
        model.get("source"),
        model.get("dtype"),
        f"on {operators}" if (operators := model.get("operators")) else None,
        f"{parameters / 1e6:,.0f} M parameters" if parameters else None,
        f"{weight_bytes / 1e9:.2f} GB" if weight_bytes else None,
    )


def _placement(placement: Mapping[str, Any]) -> str:
    if not placement:
        return ""
    target = _where(placement.get("target_devices"), placement.get("target_cores"))
    drafts = (placement.get("draft_device") or "").split(",")
    draft = _where(drafts, placement.get("draft_cores"))
    processes = "draft process" if len(drafts) == 1 else f"{len(drafts)} draft processes"
    shared = " (shared)" if placement.get("shared") else ""
    pooled = placement.get("convention") == "pooled"
    use = "; pooled: synchronous methods have all of these" if pooled else ""
    return f"target on {target}, {processes} on {draft}{shared}{use}"


def _where(devices: Iterable[str | None] | None, cores: Sequence[int] | None) -> str:
    """GPUs by name, their process's cores behind them; of a model on the CPU, its cores."""
    gpus = [name for name in devices or () if name and name != "cpu"]
    own = f"core{'s' * (len(cores or ()) > 1)} {', '.join(map(str, cores or ())) or 'none'}"
    return f"{', '.join(gpus)} ({own})" if gpus else own


def _changes(git: Mapping[str, Any]) -> str:
    """What the tree had beside its commit, named by the hash of the difference."""
    named = f" (diff {str(git['diff_sha256'])[:12]})" if git.get("diff_sha256") else ""
    return f"with local changes{named}" if git.get("dirty") else ""


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping below `key`; an empty one where there is none."""
    below = values.get(key)
    return below if isinstance(below, Mapping) else {}


def _count(number: int | None, of: str) -> str | None:
    return None if number is None else f"{number} {of}"


def _joined(*parts: Any, sep: str = ", ") -> str:
    return sep.join(str(part) for part in parts if part)
