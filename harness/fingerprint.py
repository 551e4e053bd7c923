"""What machine and what software a run was made on, and whether two of them are the same.

Every field is read, never guessed: what cannot be read is null.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from harness.decoder import Placement

# Instruction sets that decide how fast matrix products are.
_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni"}
    | {"amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"}
)
_OPENMP = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_")
_VARIABLES = (*_OPENMP, "CUDA_VISIBLE_DEVICES", "HARNESS_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# Fields that change from hour to hour, or that say nothing about speed.
_NOT_IDENTITY = ("load_average", "cpu.frequency_mhz", "environment.HARNESS_")
_NOT_IDENTITY_OF_GPUS = (".uuid",)


class GitState(NamedTuple):
    """Commit of the source tree and whether it has changes; both None outside a repository."""

    revision: str | None
    dirty: bool | None


def fingerprint(placement: Placement) -> dict[str, Any]:
    """Hardware and software identity of this machine, as JSON values."""
    import psutil

    return {
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": {
            "os": platform.system(),
            "kernel": platform.release(),
            "container": _in_container(),
        },
        "python": platform.python_version(),
        "torch": _torch(),
        "placement": {
            "target_cores": list(placement.target_cores),
            "draft_cores": list(placement.draft_cores),
            "shared": placement.shared,
            "convention": placement.convention,
        },
        "environment": _environment(os.environ),
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The fields of identity in which two fingerprints differ, a line each; empty when alike."""
    left, right = identity(a), identity(b)
    return [
        f"{name}: {left.get(name)!r} and {right.get(name)!r}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def identity(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that two runs on the same machine have in common, by dotted name."""
    return {name: value for name, value in _flat(fingerprint) if _is_identity(name)}


def _is_identity(name: str) -> bool:
    return not name.startswith(_NOT_IDENTITY) and not name.endswith(_NOT_IDENTITY_OF_GPUS)


def git_state(root: Path) -> GitState:
    """State of the repository whose top folder is `root`; a repository around it is not ours."""
    found = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return GitState(None, None)
    top, revision = found.splitlines()
    if Path(top).resolve() != root.resolve():
        return GitState(None, None)
    changes = _git(root, "status", "--porcelain")
    return GitState(revision, bool(changes) if changes is not None else None)


def package_versions() -> dict[str, str]:
    """Name -> version of every package in this environment."""
    found = {package.metadata["Name"]: package.version for package in distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower)}


def _cpu() -> dict[str, Any]:
    info = _cpu_info(_text("/proc/cpuinfo") or "")
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "microcode": info.get("microcode"),
        "flags": sorted(_FLAGS.intersection(flags)),
        "cores_total": os.cpu_count(),
        "cores_available": _cores_available(),
        "quota_cores": _quota(_text("/sys/fs/cgroup/cpu.max")),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "frequency_mhz": float(info["cpu MHz"]) if "cpu MHz" in info else None,
    }


def _cores_available() -> int | None:
    """Cores that this process may run on, where the system can restrict them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_info(text: str) -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    lines = text.partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _quota(cpu_max: str | None) -> float | None:
    """Cores that a container may use at most (cgroup v2 `cpu.max`: quota and period in µs)."""
    quota, _, period = (cpu_max or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
            "uuid": f"GPU-{gpu.uuid}",
        }
        for gpu in properties
    ]


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
    }


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    groups = _text("/proc/1/cgroup") or ""
    return any(name in groups for name in ("docker", "kubepods", "containerd", "lxc"))


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how fast kernels are or what the harness does; never a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            yield from _flat(dict(enumerate(value)), f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{key}", value


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
