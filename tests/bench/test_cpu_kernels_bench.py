"""The fused linear layers beside a loop that only reads their weights, and beside oneDNN.

Each case streams enough layers that no weight is still in a cache when its turn comes again.
"""

from __future__ import annotations

import pytest
import torch

from impl.engine.cpu_kernels import CpuKernels

STREAM_BYTES = 160 << 20
ROWS = (1, 2, 4, 6, 8, 12, 16)
SHAPES = {  # out, in
    "1.5B gate+up": (17920, 1536),
    "1.5B qkv": (2048, 1536),
    "1.5B down": (1536, 8960),
    "0.5B gate+up": (9728, 896),
    "0.5B down": (896, 4864),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    cache_dir = tmp_path_factory.mktemp("kernels")
    loaded = CpuKernels.load(cache_dir)
    if loaded is None:
        pytest.skip(f"{CpuKernels.unavailable_reason(cache_dir)}")
    return loaded


def onednn(weight: torch.Tensor, count: int):
    """A function of x that runs `count` layers packed for oneDNN."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for _ in range(count)]
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: [linear(x, weight, None, "none", [], "") for weight in packed]


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_beside_reading_its_weights(interleaved, note, kernels, kind, shape):
    weight = torch.randn(*SHAPES[shape]).bfloat16()
    quantization = None if kind == "bf16" else kind
    first = kernels.pack(weight, quantization=quantization)
    count = -(-STREAM_BYTES // first.weight_bytes)
    layers = [first, *(kernels.pack(weight, quantization=quantization) for _ in range(count - 1))]
    theirs = onednn(weight, count) if kind == "bf16" else None

    functions = {"read": lambda: [kernels.read_memory(layer.weight) for layer in layers]}
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1]).bfloat16()
        functions[f"ours {rows}"] = lambda x=x: [layer(x) for layer in layers]
        if theirs is not None:
            functions[f"oneDNN {rows}"] = lambda x=x: theirs(x)
    with torch.inference_mode():
        best = interleaved(functions, rounds=9)

    size = count * first.weight_bytes
    read, one, six = best["read"], best["ours 1"], best["ours 6"]
    speeds = " ".join(f"{rows}: {size / best[f'ours {rows}'] / 1e9:.1f}" for rows in ROWS)
    note(
        f"{kind} {shape}: GB/s by rows {speeds} (read {size / read / 1e9:.1f}); "
        f"1 row {one / read:.2f}x of reading, 6 rows {six / one:.2f}x of 1 row"
    )
    if theirs is not None:
        gains = {rows: best[f"oneDNN {rows}"] / best[f"ours {rows}"] for rows in ROWS}
        listed = " ".join(f"{rows}: {gain:.2f}x" for rows, gain in gains.items())
        note(f"{kind} {shape}: faster than oneDNN by rows {listed}")
        assert min(gains[rows] for rows in (1, 2, 4, 6)) > 1
