"""Fused, batch-invariant CPU kernels for decoding: called through ctypes.

`cpu_kernels.cpp` holds the kernels and says how they work. Results are bfloat16 (accumulated in
float32), and a row's bits do not depend on the other rows of the call, so that verifying several
tokens at once gives exactly what decoding them one by one gives. They need a C++ compiler and a CPU
with AVX512 (BF16 and VNNI); without, `CpuKernels.load` returns None and says why. Where the CPU has
AMX they use it, which changes the bits of bfloat16 layers and attention (`CpuKernels.amx`).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from impl.engine.cpu_kernel_library import KernelsUnavailableError, open_library
from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import TokenBatch

_log = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
_FORMATS = {None: 0, "int8": 1, "int4": 2}  # `Format` of the C++ source

Quantization = Literal["int8", "int4"]


class _Linear(ctypes.Structure):
    """`Linear` of the C++ source, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "steps", "panels")),
        *(
            (name, ctypes.c_int64)
            for name in ("panel_bytes", "format", "bias", "swiglu", "float_out")
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
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "window")),
    )


class _HeadNorms(ctypes.Structure):
    """`HeadNorms` of the C++ source."""

    _fields_ = (
        ("query", ctypes.c_void_p), ("key", ctypes.c_void_p), ("eps", ctypes.c_double),
    )  # fmt: skip


def _huge_page_bytes(size: int) -> torch.Tensor:
    """Uninitialised uint8 [size] on huge pages where the system gives them: steadier streaming."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + size]


class PackedLinear:
    """A linear layer whose weight is packed for the kernels; build it with `CpuKernels.pack*`.

    Attributes:
        in_features, out_features: the layer's shape.
        weight: the packed weights, scales and bias, uint8 [weight_bytes]: what one call reads.
        dtype: of the result, bfloat16 or float32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        threads: int | None,
        weight: torch.Tensor,
        *,
        up: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        quantization: Quantization | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Packs `weight` [out, in], or a SwiGLU layer of `weight` (the gate) and `up`."""
        sources = [weight] if up is None else [weight, up]
        for source in sources:
            got = f"{source.dtype} {list(source.shape)}"
            if source.dtype != torch.bfloat16 or source.dim() != 2:
                raise ValueError(f"weight: want 2-d bfloat16, got {got}")
            if source.shape != weight.shape:
                raise ValueError(f"up: want 2-d bfloat16 {list(weight.shape)}, got {got}")
        sources = [source.contiguous() for source in sources]
        bias = None if bias is None else bias.float().contiguous()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self._struct = _Linear(
            in_features=self.in_features, out_features=self.out_features,
            format=_FORMATS[quantization], bias=bias is not None, swiglu=up is not None,
            float_out=dtype == torch.float32,
        )  # fmt: skip
        self._address = ctypes.addressof(self._struct)
        self._linear, self._threads = library.linear, threads
        library.lay_out(self._address)
        self.weight_bytes = self._struct.panels * self._struct.panel_bytes
        self.weight = _huge_page_bytes(self.weight_bytes)
        self._struct.weight = self.weight.data_ptr()
        library.pack_weight(
            self._address, sources[0].data_ptr(), sources[-1].data_ptr(),
            None if bias is None else bias.data_ptr(),
        )  # fmt: skip

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
            out.data_ptr(), out.stride(0), self._threads or torch.get_num_threads(),
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class _AttentionPlan:
    """The arguments of attention that all layers of one pass share.

    Attributes:
        batch, cache, rope, window: what the plan was made for; it keeps their memory alive.
        masks: the segments' masks as bytes, and the segment table, kept alive likewise.
        struct: points into all of these.
    """

    batch: TokenBatch
    cache: KVCache
    rope: torch.Tensor
    window: int | None
    masks: list[torch.Tensor | None]
    segments: ctypes.Array[_Segment]
    struct: _Attention

    @classmethod
    def make(
        cls,
        batch: TokenBatch,
        cache: KVCache,
        rope: torch.Tensor,
        window: int | None,
        width: int,
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
            mask = None if s.tail_mask is None else s.tail(window).to(torch.uint8).contiguous()
            masks.append(mask)
            tail, address = (0, None) if mask is None else (mask.shape[1], mask.data_ptr())
            rows.append((first, s.count, s.slot, s.start, tail, address))
            first += s.count
        segments = (_Segment * len(rows))(*(_Segment(*row) for row in rows))
        struct = _Attention(
            memory.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(), batch.positions.data_ptr(),
            ctypes.addressof(segments), len(rows), first, width // head_dim - 2 * kv_heads,
            kv_heads, head_dim, *memory.stride()[:4], window or 0,
        )  # fmt: skip
        return cls(batch, cache, rope, window, masks, segments, struct)

    def fits(
        self, batch: TokenBatch, cache: KVCache, rope: torch.Tensor, window: int | None
    ) -> bool:
        """Whether the plan was made for these very objects."""
        same_pass = self.batch is batch and self.cache is cache
        return same_pass and self.rope is rope and self.window == window


class CpuKernels:
    """The compiled kernels. See the module's docstring.

    Attributes:
        amx: whether they use AMX.
        threads: of every call; None is as many as PyTorch has.
    """

    def __init__(self, library: ctypes.CDLL, amx: bool, threads: int | None) -> None:
        self._library = library
        self.amx = amx
        self._plan: _AttentionPlan | None = None
        self._no_norms = _HeadNorms()
        self.threads = threads

    @classmethod
    def load(
        cls, cache_dir: Path, threads: int | None = 1, *, amx: bool = True
    ) -> CpuKernels | None:
        """Builds the kernels into `cache_dir` if need be and loads them.

        Args:
            cache_dir: where the library is kept, named by source, compiler and flags.
            threads: threads of every call; 1 uses the calling thread only, None as many as PyTorch
                has at the call.
            amx: use AMX where the CPU, the compiler and the system offer it.

        Returns:
            None (and a log line with the reason) on a machine that cannot build or run them.
        """
        try:
            return cls(*open_library(cache_dir, amx), threads)
        except KernelsUnavailableError as error:
            _log.info("CPU kernels unavailable: %s", error)
            return None

    @staticmethod
    def unavailable_reason(cache_dir: Path) -> str | None:
        """Why `load` returns None, or None when it does not."""
        try:
            open_library(cache_dir, amx=True)
        except KernelsUnavailableError as error:
            return str(error)
        return None

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        quantization: Quantization | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> PackedLinear:
        """A layer of bfloat16 weight [out, in] and bias [out] with results of `dtype`.

        Args:
            weight: quantised here if at all.
            bias: added in float32.
            quantization: "int8", symmetric per output, or "int4", a scale and a minimum per output
                and group of 32 inputs; activations are then int8, symmetric per token. None keeps
                bfloat16.
            dtype: bfloat16 or float32.
        """
        return PackedLinear(
            self._library, self.threads, weight, bias=bias, quantization=quantization, dtype=dtype
        )

    def pack_swiglu(
        self, gate: torch.Tensor, up: torch.Tensor, *, quantization: Quantization | None = None
    ) -> PackedLinear:
        """silu(x G^T) * (x U^T) as one layer, of bfloat16 weights [out, in]; see `pack`."""
        return PackedLinear(self._library, self.threads, gate, up=up, quantization=quantization)

    def attention(
        self,
        qkv: torch.Tensor,
        rope: torch.Tensor,
        batch: TokenBatch,
        cache: KVCache,
        layer: int,
        *,
        window: int | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
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
            window: how many tokens a token sees, itself included; None is all.
            query_norm: bfloat16 [head_dim]; applies RMSNorm to each query head first.
            key_norm: the same of key heads.
            eps: of these norms.

        Returns:
            bfloat16 [N, heads * head_dim].
        """
        rows, width = qkv.shape
        plan = self._plan
        if plan is None or not plan.fits(batch, cache, rope, window):
            plan = self._plan = _AttentionPlan.make(batch, cache, rope, window, width)
        struct = plan.struct
        norms = self._no_norms
        if query_norm is not None or key_norm is not None:
            norms = _HeadNorms(
                *(n if n is None else n.data_ptr() for n in (query_norm, key_norm)), eps
            )
        out = torch.empty((rows, struct.heads * struct.head_dim), dtype=torch.bfloat16)
        self._library.attention(
            ctypes.addressof(struct), ctypes.addressof(norms), qkv.data_ptr(), layer,
            out.data_ptr(), self.threads or torch.get_num_threads(),
        )  # fmt: skip
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
