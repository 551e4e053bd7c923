"""Fused, batch-invariant CPU kernels for decoding: compiled on first use, called through ctypes.

`cpu_kernels.cpp` holds the kernels and says how they work. Results are bfloat16 (accumulated in
float32), and a row's bits do not depend on the other rows of the call, so that verifying several
tokens at once gives exactly what decoding them one by one gives. They need a C++ compiler and a CPU
with AVX512 (BF16 and VNNI); without, `CpuKernels.load` returns None and says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import TokenBatch

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "fma")
_FLAGS = (
    "-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off",
    *(f"-m{feature.replace('512_', '512')}" for feature in _FEATURES),
)  # fmt: skip
_PANEL_COLUMNS, _STEP_BYTES = 32, 128
_UNROLL_BYTES = 16  # bytes of a row that one turn of the inner loop takes
_HUGE_PAGE = 2 << 20
_QUANTIZE_ROWS = 4096  # rows quantised at a time: bounds the float32 copy


class KernelsUnavailableError(Exception):
    """This machine cannot build or run the kernels; the message says why."""


class _Linear(ctypes.Structure):
    """`Linear` of the C++ source, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "steps", "panels")),
        *(
            (name, ctypes.c_int64)
            for name in ("panel_bytes", "int8", "bias", "swiglu", "float_out")
        ),
    )


class _Segment(ctypes.Structure):
    """`Segment` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row", "count", "slot", "start", "tail")),
        ("mask", ctypes.c_void_p),
    )


class _Attention(ctypes.Structure):
    """`Attention` of the C++ source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("memory", "cosine", "sine", "positions", "segments")
        ),
        *((name, ctypes.c_int64) for name in ("segment_count", "rows", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "layer_stride", "value_offset")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride")),
    )


def _missing_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The CPU features the kernels need and this machine lacks."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return [feature for feature in _FEATURES if feature not in flags]


def _build(cache_dir: Path) -> Path:
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
    key = hashlib.sha256("\0".join((_SOURCE.read_text(), version, *_FLAGS)).encode()).hexdigest()
    library = cache_dir / f"cpu_kernels-{key[:16]}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
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
        "pack_weight": (pointer, integer, integer, integer, integer, pointer),
        "linear": (pointer, pointer, integer, integer, pointer, real, pointer, integer, pointer,
                   integer, integer),
        "rms_norm": (pointer, integer, integer, integer, pointer, real, pointer, integer),
        "attention": (pointer, pointer, integer, pointer, integer),
        "read_memory": (pointer, integer),
    }  # fmt: skip
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _huge_page_bytes(size: int) -> torch.Tensor:
    """Uninitialised uint8 [size] on huge pages where the system gives them: steadier streaming."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + size]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 rows of gate, the 16 rows of up that belong to them, and so on; [2 n, ...], n padded."""
    blocks = []
    for rows in (gate, up):
        padding = rows.new_zeros(-len(rows) % 16, *rows.shape[1:])
        blocks.append(torch.cat((rows, padding)).view(-1, 16, *rows.shape[1:]))
    return torch.stack(blocks, dim=1).flatten(0, 2)


class PackedLinear:
    """A linear layer whose weight is packed for the kernels; build it with `CpuKernels.pack_*`.

    Attributes:
        in_features, out_features: the layer's shape.
        weight: the packed weights, scales and bias, uint8 [weight_bytes]: what one call reads.
        dtype: of the result, bfloat16 or float32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        threads: int,
        weight: torch.Tensor,
        *,
        out_features: int,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        swiglu: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Packs `weight` [columns, in_features], bfloat16, or int8 with `scale` [columns]."""
        if weight.dtype not in (torch.bfloat16, torch.int8) or weight.dim() != 2:
            raise ValueError(f"weight: want 2-d bfloat16 or int8, got {weight.dtype}")
        weight = weight.contiguous()
        columns, self.in_features = weight.shape
        tails = [] if bias is None else [bias.float()]
        if scale is not None:
            tails = [128 * weight.sum(1, dtype=torch.int32), scale, *tails]
        row_bytes = self.in_features * weight.element_size()
        steps = _round_up(row_bytes, _UNROLL_BYTES) // 4
        panels = -(-columns // _PANEL_COLUMNS)
        panel_bytes = (steps + len(tails)) * _STEP_BYTES
        packed = _huge_page_bytes(panels * panel_bytes)
        library.pack_weight(
            weight.data_ptr(), columns, row_bytes, steps, panel_bytes, packed.data_ptr()
        )
        for i, tail in enumerate(tails, start=steps):
            padded = F.pad(tail, (0, panels * _PANEL_COLUMNS - columns)).view(panels, -1)
            place = slice(i * _STEP_BYTES, (i + 1) * _STEP_BYTES)
            packed.view(panels, panel_bytes)[:, place] = padded.view(torch.uint8)
        self.weight = packed
        self._struct = _Linear(
            packed.data_ptr(), self.in_features, out_features, steps, panels, panel_bytes,
            weight.dtype == torch.int8, bias is not None, swiglu, dtype == torch.float32,
        )  # fmt: skip
        self._address = ctypes.addressof(self._struct)
        self._linear, self._threads = library.linear, threads
        self.out_features, self.dtype = out_features, dtype
        self.weight_bytes = len(packed)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes norm(x) W^T + b + residual, rounded once at the end.

        Args:
            x: bfloat16 [M, in_features]; rows may be strided, elements of a row must be adjacent.
            norm_weight: bfloat16 [in_features]; applies RMSNorm to x first.
            eps: of that norm.
            residual: bfloat16 [M, out_features], rows as for x.
            out: [M, out_features] of the layer's dtype; must not overlap x.

        Returns:
            `out`, or a new tensor.
        """
        rows, width = x.shape
        if width != self.in_features:
            raise ValueError(f"x: {width} features, the layer takes {self.in_features}")
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=self.dtype)
        self._linear(
            self._address, x.data_ptr(), rows, x.stride(0),
            None if norm_weight is None else norm_weight.data_ptr(), eps,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(), out.stride(0), self._threads,
        )  # fmt: skip
        return out


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: q [n, k] and scale float32 [n] with weight ~ q * scale."""
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), _QUANTIZE_ROWS):
        rows = slice(begin, begin + _QUANTIZE_ROWS)
        block = weight[rows].float()
        largest = block.abs().amax(1)
        scale[rows] = largest / 127
        inverse = torch.full_like(largest, 127.0).div_(largest).where(largest > 0, 0.0)
        quantized[rows] = (block * inverse[:, None]).round_().to(torch.int8)
    return quantized, scale


@dataclass(frozen=True)
class _AttentionPlan:
    """The arguments of attention that all layers of one pass share.

    Attributes:
        batch, cache, rope: what the plan was made for; it keeps their memory alive.
        masks: the segments' masks as bytes, and the segment table, kept alive likewise.
        struct: points into all of these.
    """

    batch: TokenBatch
    cache: KVCache
    rope: torch.Tensor
    masks: list[torch.Tensor | None]
    segments: ctypes.Array[_Segment]
    struct: _Attention

    @classmethod
    def make(
        cls, batch: TokenBatch, cache: KVCache, rope: torch.Tensor, width: int
    ) -> _AttentionPlan:
        """Checks and lays out a pass whose qkv rows have `width` values."""
        memory = cache.memory
        kv_heads, cells, head_dim = memory.shape[3:]
        if memory.dtype != torch.bfloat16 or rope.dtype != torch.bfloat16:
            raise ValueError(f"cache, rope: want bfloat16, got {memory.dtype}, {rope.dtype}")
        if head_dim % 32 or not memory.is_contiguous() or not rope.is_contiguous():
            raise ValueError("cache, rope: want contiguous memory and a head_dim in steps of 32")
        masks, rows = [], []
        first = 0
        for s in batch.segments:
            if s.end > cells:
                raise ValueError(f"batch: cell {s.end - 1} is outside the slot's {cells} cells")
            mask = None if s.tail_mask is None else s.tail_mask.to(torch.uint8).contiguous()
            masks.append(mask)
            tail, address = (0, None) if mask is None else (mask.shape[1], mask.data_ptr())
            rows.append((first, s.count, s.slot, s.start, tail, address))
            first += s.count
        segments = (_Segment * len(rows))(*(_Segment(*row) for row in rows))
        struct = _Attention(
            memory.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(), batch.positions.data_ptr(),
            ctypes.addressof(segments), len(rows), first, width // head_dim - 2 * kv_heads,
            kv_heads, head_dim, *memory.stride()[:4],
        )  # fmt: skip
        return cls(batch, cache, rope, masks, segments, struct)

    def fits(self, batch: TokenBatch, cache: KVCache, rope: torch.Tensor) -> bool:
        """Whether the plan was made for these very objects."""
        return self.batch is batch and self.cache is cache and self.rope is rope


class CpuKernels:
    """The compiled kernels. See the module's docstring."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._plan: _AttentionPlan | None = None
        self.threads = threads

    @classmethod
    def load(cls, cache_dir: Path, threads: int = 1) -> CpuKernels | None:
        """Builds the kernels into `cache_dir` if need be and loads them.

        Args:
            cache_dir: where the library is kept, named by source, compiler and flags.
            threads: threads of every call; 1 uses the calling thread only.

        Returns:
            None (and a log line with the reason) on a machine that cannot build or run them.
        """
        try:
            return cls(_bind(_build(cache_dir)), threads)
        except KernelsUnavailableError as error:
            _log.info("CPU kernels unavailable: %s", error)
            return None

    @staticmethod
    def unavailable_reason(cache_dir: Path) -> str | None:
        """Why `load` returns None, or None when it does not."""
        try:
            _bind(_build(cache_dir))
        except KernelsUnavailableError as error:
            return str(error)
        return None

    def pack_bf16(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> PackedLinear:
        """A layer of bfloat16 weight [out, in] and bias [out] with results of `dtype`."""
        return PackedLinear(
            self._library, self.threads, weight, out_features=len(weight), bias=bias, dtype=dtype
        )

    def pack_int8(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> PackedLinear:
        """As `pack_bf16`, with int8 weights (symmetric per output) and activations (per token)."""
        quantized, scale = quantize_weight(weight)
        return PackedLinear(
            self._library, self.threads, quantized,
            out_features=len(weight), bias=bias, scale=scale, dtype=dtype,
        )  # fmt: skip

    def pack_swiglu_bf16(self, gate: torch.Tensor, up: torch.Tensor) -> PackedLinear:
        """silu(x G^T) * (x U^T) as one layer, of bfloat16 weights [out, in]."""
        return PackedLinear(
            self._library, self.threads, _interleave(gate, up), out_features=len(gate), swiglu=True
        )

    def pack_swiglu_int8(self, gate: torch.Tensor, up: torch.Tensor) -> PackedLinear:
        """As `pack_swiglu_bf16`, quantised as in `pack_int8`."""
        quantized, scale = quantize_weight(_interleave(gate, up))
        return PackedLinear(
            self._library, self.threads, quantized,
            out_features=len(gate), scale=scale, swiglu=True,
        )  # fmt: skip

    def attention(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: TokenBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """Rotates q and k, writes k and v to the cache, attends with a float32 softmax.

        Args:
            qkv: bfloat16 [N, (heads + 2 kv_heads) * head_dim], contiguous: query heads first, then
                keys, then values.
            rope: bfloat16 cosines and sines [2, max_position, head_dim], halves repeated as in
                Hugging Face's Llama.
            batch: where the N rows belong.
            cache: read and written at `layer`; every cell before a segment's end is finite.
            layer: index of the layer.

        Returns:
            bfloat16 [N, heads * head_dim].
        """
        rows, width = qkv.shape
        plan = self._plan
        if plan is None or not plan.fits(batch, cache, rope):
            plan = self._plan = _AttentionPlan.make(batch, cache, rope, width)
        struct = plan.struct
        out = torch.empty((rows, struct.heads * struct.head_dim), dtype=torch.bfloat16)
        self._library.attention(
            ctypes.addressof(struct), qkv.data_ptr(), layer, out.data_ptr(), self.threads
        )
        return out

    def read_memory(self, data: torch.Tensor) -> None:
        """Reads a contiguous tensor once and does nothing else: the floor of a linear layer."""
        self._library.read_memory(data.data_ptr(), data.numel() * data.element_size() // 256 * 256)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / rms(x) * weight on bfloat16 [M, n], rounded as Hugging Face's Llama does."""
        rows, n = x.shape
        out = torch.empty((rows, n), dtype=torch.bfloat16)
        self._library.rms_norm(
            x.data_ptr(), rows, n, x.stride(0), weight.data_ptr(), eps, out.data_ptr(), n
        )
        return out
