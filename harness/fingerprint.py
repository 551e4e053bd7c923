"""What machine and what software a run was made on, and whether two of them are the same.

Every field is read, never guessed: what cannot be read is null.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from harness.decoder import Placement
from harness.nvml import gpu_settings

# Instruction sets that decide how fast matrix products are.
_FLAGS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni"}
    | {"amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"}
)
_CPU = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLIS_", "ATEN_")
_CUDA = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")
_GPU = (*_CUDA, "CUBLAS", "CUDNN_", "NCCL_", "NVIDIA_TF32_OVERRIDE")
_PYTORCH = ("PYTORCH_", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_MEMORY = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES")
_VARIABLES = (*_CPU, *_GPU, *_PYTORCH, *_MEMORY, "HARNESS_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# Fields that change from hour to hour, or that say nothing about speed.
_VARIABLE = "environment."
_ABSENT_IS_NONE = (_VARIABLE, "emulated", "synthetic")  # else a version may not have told it
_CACHES = (f"{_VARIABLE}TORCHINDUCTOR_CACHE_DIR",)  # torch sets it when it first compiles
_NOT_IDENTITY = ("load_average", "cpu.frequency_mhz", f"{_VARIABLE}HARNESS_", *_CACHES)
_NOT_IDENTITY_OF_GPUS = (".uuid",)
_MEMORY_TOLERANCE = 0.01


def fingerprint(placement: Placement) -> dict[str, Any]:
    """Hardware and software identity of this machine, as JSON values."""
    import psutil

    return {
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "gpu_driver": _text("/sys/module/nvidia/version"),
        "system": {
            "os": platform.system(),
            "kernel": platform.release(),
            "container": _in_container(),
        },
        "python": platform.python_version(),
        "torch": _torch(),
        "libraries": _libraries(),
        "placement": {
            "target_cores": list(placement.target_cores),
            "draft_cores": list(placement.draft_cores),
            "shared": placement.shared,
            "convention": placement.convention,
            "target_devices": list(placement.target_devices),
            "draft_device": placement.draft_device,
            "channel": placement.channel,
        },
        "environment": _environment(os.environ),
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def machine_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The fields of identity in which two fingerprints differ, a line each; empty when alike.

    What only one of them tells (they may be of two versions of this program) is no difference.
    """
    left, right = identity(a), identity(b)
    told = left.keys() & right.keys()
    told |= {name for name in left.keys() | right.keys() if name.startswith(_ABSENT_IS_NONE)}
    told -= {name for name in told if _nearly_equal(name, left, right)}
    return differences(*({k: v for k, v in flat.items() if k in told} for flat in (left, right)))


def identity(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that two runs on the same machine have in common, by dotted name."""
    numbered = _flat(_by_number(fingerprint))
    return {name: value for name, value in numbered if _is_identity(name)}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The fields in which two records differ, a line each; an absent field is a null one."""
    left, right = dict(_flat(a)), dict(_flat(b))
    return [
        f"{name}: {left.get(name)!r} and {right.get(name)!r}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def lacks_accelerator(fingerprint: Mapping[str, Any], name: str) -> str | None:
    """Why a machine does not have GPUs of that name and no others; None where it does."""
    found = [gpu["name"] for gpu in fingerprint.get("gpus", ())]
    if found and all(name.lower() in gpu.lower() for gpu in found):
        return None
    return f"require_accelerator: {name} is not what it has ({', '.join(found) or 'no GPU'})"


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
    found: list[dict[str, Any]] = [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
            "uuid": f"GPU-{gpu.uuid}",
        }
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    settings = gpu_settings([gpu["uuid"] for gpu in found])
    return [gpu | asdict(own) for gpu, own in zip(found, settings, strict=True)]


def _torch() -> dict[str, Any]:
    """PyTorch, what it computes with, and the instruction set that its kernels use here."""
    import torch

    built, cuda = torch.__config__.show(), torch.version.cuda
    cudnn: Any = torch.backends.cudnn  # untyped
    nccl: Any = torch.cuda.nccl
    return {
        "version": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas": _built_with(r"BLAS_INFO=(\w+)", built),
        "mkl": _built_with(r"Math Kernel Library Version (\S+)", built),
        "onednn": _built_with(r"MKL-DNN v([\d.]+)", built),
        "cuda": cuda,
        "cudnn": cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
    }


def _built_with(pattern: str, built: str) -> str | None:
    found = re.search(pattern, built)
    return found[1] if found else None


def _libraries() -> dict[str, str | None]:
    """Versions of packages that compute or decode; null where one is not installed."""
    installed = package_versions()
    return {name: installed.get(name) for name in ("transformers", "tokenizers", "flash-attn")}


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


def _by_number(values: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint with its list of GPUs as number -> GPU, and how many there are."""
    gpus = values.get("gpus", [])
    numbered = {str(number): gpu for number, gpu in enumerate(gpus)}
    return {**values, "gpus": {"count": len(gpus), **numbered}}


def _nearly_equal(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Firmware keeps a little memory for itself, on like machines not the same amount."""
    if not name.endswith("memory_bytes"):
        return False
    a, b = left[name], right[name]
    return bool(abs(a - b) <= _MEMORY_TOLERANCE * max(a, b))


def _is_identity(name: str) -> bool:
    return not name.startswith(_NOT_IDENTITY) and not name.endswith(_NOT_IDENTITY_OF_GPUS)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
