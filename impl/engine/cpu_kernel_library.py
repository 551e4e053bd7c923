"""The shared library of `cpu_kernels.cpp`: compiled on first use, and its argument types."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "fma")
_AMX_FEATURES = ("amx_tile", "amx_bf16", "amx_int8")  # all or none
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")


class KernelsUnavailableError(Exception):
    """This machine cannot build or run the kernels; the message says why."""


def _missing_features(
    needed: Sequence[str] = _FEATURES, cpuinfo: Path = Path("/proc/cpuinfo")
) -> list[str]:
    """The needed CPU features that this machine lacks."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return [feature for feature in needed if feature not in flags]


def _option(feature: str) -> str:
    """The compiler's option for a feature as /proc/cpuinfo spells it."""
    return f"-m{feature.replace('512_', '512').replace('amx_', 'amx-')}"


def _build(cache_dir: Path, amx: bool) -> Path:
    """Compiles the source into `cache_dir` unless it is there; returns the shared library.

    Raises:
        KernelsUnavailableError: no compiler, a missing CPU feature, or a failed compilation.
    """
    if missing := _missing_features():
        raise KernelsUnavailableError(f"the CPU lacks {', '.join(missing)}")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler: neither g++ nor clang++ is on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    flags = (*_FLAGS, *map(_option, (*_FEATURES, *(_AMX_FEATURES if amx else ()))))
    key = hashlib.sha256("\0".join((_SOURCE.read_text(), version, *flags)).encode()).hexdigest()
    library = cache_dir / f"cpu_kernels-{key[:16]}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *flags, str(_SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise KernelsUnavailableError(f"{' '.join(command)} failed:\n{done.stderr}")
            os.replace(built, library)  # noqa: PTH105 (atomic: several processes may build at once)
    except OSError as error:
        raise KernelsUnavailableError(f"cannot build in {cache_dir}: {error}") from error
    return library


def _bind(path: Path) -> ctypes.CDLL:
    """Loads the library and declares its functions' arguments."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"cannot load {path}: {error}") from error
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    arguments = {
        "lay_out": (pointer,),
        "pack_weight": (pointer, pointer, pointer, pointer),
        "linear": (pointer, pointer, integer, integer, pointer, real, pointer, integer, pointer,
                   integer, integer),
        "rms_norm": (pointer, integer, integer, integer, pointer, real, pointer, integer),
        "attention": (pointer, pointer, pointer, integer, pointer, integer),
        "read_memory": (pointer, integer),
    }  # fmt: skip
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.permit_amx.argtypes, library.permit_amx.restype = (), integer
    if not library.permit_amx():
        raise KernelsUnavailableError(f"{path}: the system refuses the use of AMX")
    return library


def open_library(cache_dir: Path, amx: bool) -> tuple[ctypes.CDLL, bool]:
    """The library, and whether it uses AMX: where that is wanted, and can be built and run.

    Raises:
        KernelsUnavailableError: not even without AMX.
    """
    if amx and not _missing_features(_AMX_FEATURES):
        try:
            return _bind(_build(cache_dir, amx=True)), True
        except KernelsUnavailableError as error:  # an old compiler, or a system that refuses
            _log.info("AMX unavailable: %s", error)
    return _bind(_build(cache_dir, amx=False)), False
