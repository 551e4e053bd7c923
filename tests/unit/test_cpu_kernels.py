"""The CPU kernels against float64 products and Hugging Face's Llama, and bit by bit in batches.

`UNIT` is bfloat16's unit roundoff: rounding once changes a value by at most UNIT of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from impl.engine import cpu_kernel_library
from impl.engine.cpu_kernels import CpuKernels, PackedLinear, Quantization
from impl.engine.kv_cache import KVCache
from impl.engine.token_batch import Segment, TokenBatch

UNIT = 2.0**-8
QUANTIZATIONS: tuple[Quantization | None, ...] = (None, "int8", "int4")
ROWS = (*range(1, 18), 31, 32, 33, 40)
# out, in: whole blocks; neither out nor in whole; SmolLM2-135M qkv; Qwen2.5-0.5B down.
SHAPES = ((64, 64), (37, 51), (960, 576), (896, 4864))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=[False, True], ids=["avx512", "amx"])
def kernels(cache_dir: Path, request: pytest.FixtureRequest) -> CpuKernels:
    loaded = CpuKernels.load(cache_dir, amx=request.param)
    if loaded is None:
        pytest.skip(f"{CpuKernels.unavailable_reason(cache_dir)}")
    if loaded.amx != request.param:
        pytest.skip("no AMX here: of the CPU, the compiler or the system")
    return loaded


@pytest.fixture(scope="module")
def two_threads(kernels: CpuKernels, cache_dir: Path) -> CpuKernels:
    loaded = CpuKernels.load(cache_dir, threads=2, amx=kernels.amx)
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_within(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    excess = (actual.double() - exact).abs() - bound
    assert excess.max() <= 0, f"off by {excess.max()} beyond the bound"


def product_bound(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """One rounding to bfloat16, and float32 rounding of each of the k additions."""
    terms = x.double().abs() @ weight.double().abs().T
    return UNIT * exact.abs() + weight.shape[1] * 2.0**-24 * terms + 1e-6


# ----------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("rows", [1, 6, 13, 40])
def test_bf16_linear_is_the_float64_product_rounded_once(
    kernels: CpuKernels, out_features: int, in_features: int, rows: int
) -> None:
    weight, bias = normal(out_features, in_features), normal(out_features)
    x, residual = normal(rows, in_features), normal(rows, out_features)
    exact = x.double() @ weight.double().T + bias.double() + residual.double()
    y = kernels.pack(weight, bias)(x, residual=residual)
    assert y.shape == (rows, out_features)
    assert y.dtype == torch.bfloat16
    assert_within(y, exact, product_bound(x, weight, exact) + UNIT * 1e-3)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("rows", [1, 6, 13])
def test_int8_linear_is_the_product_of_the_quantised_values(
    kernels: CpuKernels, out_features: int, in_features: int, rows: int
) -> None:
    weight, bias, x = (
        normal(out_features, in_features),
        normal(out_features),
        normal(rows, in_features),
    )
    q_weight, scale = by_hand_int8(weight)
    q_x, x_scale = by_hand_int8(x)
    exact = (q_x @ q_weight.T) * (x_scale[:, None] * scale) + bias.double()
    y = kernels.pack(weight, bias, quantization="int8")(x)
    assert_within(y, exact, UNIT * exact.abs() + 1e-5 * (1 + bias.double().abs()))


def by_hand_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric per row in float32, as float64: integers [n, k] and scales [n]."""
    largest = rows.float().abs().amax(1)
    integers = (rows.float() * (torch.tensor(127.0) / largest)[:, None]).round()
    return integers.double(), (largest / 127).double()


def dequantised_int8(rows: torch.Tensor) -> torch.Tensor:
    integers, scale = by_hand_int8(rows)
    return integers * scale[:, None]


def levels_of(kernels: CpuKernels, weight: torch.Tensor) -> torch.Tensor:
    """The int4 weights as numbers: what the layer makes of the rows of the identity.

    A row of the identity is quantised without error, to 127 and a scale of 1 / 127.
    """
    layer = kernels.pack(weight, quantization="int4", dtype=torch.float32)
    return layer(torch.eye(weight.shape[1]).bfloat16()).double().T


def least_squared_error(group: torch.Tensor) -> float:
    """Of any 16 equally spaced levels that a dense search finds for a group of weights."""
    low, spread = group.min(), group.max() - group.min()
    begin = (low + spread * torch.linspace(-0.1, 0.2, 61))[:, None, None]
    scale = (spread / torch.linspace(9, 18, 181))[:, None]
    nearest = begin + ((group - begin) / scale).round().clamp(0, 15) * scale
    return float(((nearest - group) ** 2).sum(-1).min())


def test_int4_groups_are_fitted_nearly_as_well_as_they_can_be(kernels: CpuKernels) -> None:
    weight = 0.02 * normal(37, 96)
    found, exact = (w.double().reshape(-1, 32) for w in (levels_of(kernels, weight), weight))
    best = sum(least_squared_error(row) for row in exact)
    assert float(((found - exact) ** 2).sum()) <= 1.12 * best


def test_int4_keeps_weights_that_16_levels_can_hold(kernels: CpuKernels) -> None:
    """By hand: steps of a power of two from some minimum, equal weights, and zeros lose nothing."""
    levels = torch.arange(16.0).repeat(4)
    weight = torch.stack(
        (levels / 64 - 0.125, 0.25 - levels / 1024, 5 - levels % 10, 0 * levels + 0.3, 0 * levels)
    ).bfloat16()
    torch.testing.assert_close(levels_of(kernels, weight), weight.double(), rtol=1e-5, atol=1e-6)


def grouped(values: torch.Tensor) -> torch.Tensor:
    """[n, k] -> [n, groups, 32], padded with zeros."""
    return F.pad(values, (0, -values.shape[1] % 32)).unflatten(1, (-1, 32))


def minimum_bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum of a group's x, which multiplies the group's minimum, is rounded to bfloat16."""
    return UNIT * grouped(x).sum(2).abs() @ grouped(weight).abs().amax(2).T


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("rows", [1, 6, 13])
def test_int4_linear_is_the_product_of_the_quantised_values(
    kernels: CpuKernels, out_features: int, in_features: int, rows: int
) -> None:
    weight, bias = normal(out_features, in_features), normal(out_features)
    x, residual = normal(rows, in_features), normal(rows, out_features)
    near_x, near_weight = dequantised_int8(x), levels_of(kernels, weight)
    exact = near_x @ near_weight.T + bias.double() + residual.double()
    y = kernels.pack(weight, bias, quantization="int4")(x, residual=residual)
    assert_within(y, exact, UNIT * exact.abs() + minimum_bound(near_x, near_weight) + 1e-3)


@pytest.mark.parametrize("inner", [48, 40])  # whole and broken blocks of 16
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_swiglu_is_silu_of_gate_times_up(
    kernels: CpuKernels, inner: int, quantization: Quantization | None
) -> None:
    gate, up, half = normal(inner, 96), normal(inner, 96), normal(7, 48)
    x = torch.stack((half, -half), dim=2).flatten(1)  # sums of groups are 0: int4 rounds nothing
    layer = kernels.pack_swiglu(gate, up, quantization=quantization)
    if quantization:
        by_hand = {"int8": dequantised_int8, "int4": lambda w: levels_of(kernels, w)}[quantization]
        pair, exact_x = [by_hand(gate), by_hand(up)], dequantised_int8(x)
    else:
        pair, exact_x = [gate.double(), up.double()], x.double()
    exact = F.silu(exact_x @ pair[0].T) * (exact_x @ pair[1].T)
    assert_within(layer(x), exact, UNIT * exact.abs() + 1e-3)


def test_result_in_float32_is_not_rounded_to_bfloat16(kernels: CpuKernels) -> None:
    weight, x = normal(100, 64), normal(3, 64)
    y = kernels.pack(weight, dtype=torch.float32)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_zero_rows_and_strided_rows(kernels: CpuKernels) -> None:
    layer, wide = kernels.pack(normal(40, 64)), normal(5, 100)
    assert layer(wide[:0, :64]).shape == (0, 40)
    assert torch.equal(layer(wide[:, :64]), layer(wide[:, :64].contiguous()))
    out = torch.zeros(5, 50, dtype=torch.bfloat16)
    layer(wide[:, :64], out=out[:, :40])
    assert torch.equal(out[:, :40], layer(wide[:, :64]))
    assert not out[:, 40:].any()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layer_keeps_a_broken_row_visible_and_to_itself(
    kernels: CpuKernels, quantization: Quantization
) -> None:
    layer, x = kernels.pack(normal(32, 64), quantization=quantization), normal(4, 64)
    clean = layer(x)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    broken = layer(x)
    assert not broken[1:3].isfinite().any()
    assert torch.equal(broken[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_row_of_zeros_gives_the_bias(
    kernels: CpuKernels, quantization: Quantization
) -> None:
    bias = normal(32)
    layer = kernels.pack(normal(32, 64), bias, quantization=quantization)
    assert torch.equal(layer(torch.zeros(1, 64, dtype=torch.bfloat16))[0], bias)


def test_weights_of_another_type_or_shape_are_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match=r"want 2-d bfloat16, got torch\.float32"):
        kernels.pack(torch.zeros(8, 64))
    with pytest.raises(ValueError, match=r"want 2-d bfloat16 \[8, 64\], got .* \[9, 64\]"):
        kernels.pack_swiglu(normal(8, 64), normal(9, 64))


def test_wrong_width_is_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="x: 65 features, the layer takes 64"):
        kernels.pack(normal(8, 64))(normal(1, 65))


def build(
    kernels: CpuKernels,
    swiglu: bool,
    quantization: Quantization | None,
    out_features: int,
    in_features: int,
) -> PackedLinear:
    """A layer that is the same at every call; results in float32 where possible hide nothing."""
    torch.manual_seed(1)
    weight, other = normal(out_features, in_features), normal(out_features, in_features)
    if swiglu:
        return kernels.pack_swiglu(weight, other, quantization=quantization)
    bias = normal(out_features)
    return kernels.pack(weight, bias, quantization=quantization, dtype=torch.float32)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("out_features", "in_features"), [(37, 51), (960, 576)])
def test_a_row_has_the_same_bits_in_every_batch(
    kernels: CpuKernels,
    two_threads: CpuKernels,
    swiglu: bool,
    quantization: Quantization | None,
    out_features: int,
    in_features: int,
) -> None:
    x, residual = normal(40, in_features), normal(40, out_features)
    norm = normal(in_features)
    one = build(kernels, swiglu, quantization, out_features, in_features)
    alone = torch.cat(
        [one(x[i : i + 1], norm_weight=norm, eps=1e-6, residual=residual[i : i + 1])
         for i in range(40)]
    )  # fmt: skip
    for layer in (one, build(two_threads, swiglu, quantization, out_features, in_features)):
        for rows in ROWS:
            tail = slice(40 - rows, 40)
            y = layer(x[tail], norm_weight=norm, eps=1e-6, residual=residual[tail])
            assert torch.equal(y, alone[tail]), f"{rows} rows"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layers_have_the_same_bits_with_and_without_amx(
    kernels: CpuKernels, cache_dir: Path, quantization: Quantization
) -> None:
    vectors = CpuKernels.load(cache_dir, amx=False)
    assert vectors is not None
    for out_features, in_features in SHAPES:
        layers = [
            build(each, False, quantization, out_features, in_features)
            for each in (kernels, vectors)
        ]
        for rows in ROWS:
            x = normal(rows, in_features)
            assert torch.equal(layers[0](x), layers[1](x)), f"{in_features} inputs, {rows} rows"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_threads_follow_pytorchs_and_change_no_bit(
    kernels: CpuKernels, cache_dir: Path, quantization: Quantization | None
) -> None:
    following = CpuKernels.load(cache_dir, threads=None, amx=kernels.amx)
    assert following is not None
    x, before = normal(5, 576), torch.get_num_threads()
    layer = build(following, False, quantization, 960, 576)
    seen = []
    library_call = layer._linear
    layer._linear = lambda *arguments: (seen.append(arguments[-1]), library_call(*arguments))
    try:
        outputs = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            outputs.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 1]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


# ------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("size", [576, 1536, 50])
def test_rms_norm_is_hugging_faces(kernels: CpuKernels, size: int) -> None:
    x, norm = 3 * normal(5, size), LlamaRMSNorm(size, eps=1e-5).bfloat16()
    norm.weight.data = normal(size)
    y = kernels.rms_norm(x, norm.weight.data, 1e-5)
    expected = norm(x).detach()
    torch.testing.assert_close(
        y, expected, rtol=2 * UNIT, atol=0
    )  # float32 sums may tip a rounding
    assert (y == expected).float().mean() > 0.99


def test_fused_norm_is_the_norm_then_the_layer(kernels: CpuKernels) -> None:
    x, weight = normal(9, 576), normal(576)
    for quantization in QUANTIZATIONS:
        layer = kernels.pack(normal(64, 576), quantization=quantization)
        fused = layer(x, norm_weight=weight, eps=1e-5)
        assert torch.equal(fused, layer(kernels.rms_norm(x, weight, 1e-5)))


# -------------------------------------------------------------------------------------- attention

HEADS = [(9, 3, 64), (14, 2, 64), (12, 2, 128), (2, 2, 32), (4, 4, 256)]  # heads, kv heads, D


def new_cache(kv_heads: int, head_dim: int, cells: int = 96) -> KVCache:
    cache = KVCache(
        layers=2, slots=2, kv_heads=kv_heads, cells=cells, head_dim=head_dim,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    cache.memory.copy_(torch.randn_like(cache.memory))
    return cache


def no_rotation(cells: int, head_dim: int) -> torch.Tensor:
    shape = (cells, head_dim)
    return torch.stack((torch.ones(shape), torch.zeros(shape))).bfloat16()


def rotation(cells: int, head_dim: int) -> torch.Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(cells), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin())).bfloat16()


def batch_of(*segments: Segment) -> TokenBatch:
    positions = [s.start + i for s in segments for i in range(s.count)]
    return TokenBatch.pack(positions, positions, segments)


def assert_attends(
    y: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> None:
    """Checks y [n, heads * D] against softmax(q k^T / sqrt(D)) v in float64.

    Weights are rounded to bfloat16 before they multiply: at most UNIT of sum(p |v|), beside one
    rounding of the result. The doubled bound covers the same rounding in the divisor.
    """
    group = q.shape[1] // keys.shape[0]
    keys, values = (t.double().repeat_interleave(group, 0) for t in (keys, values))
    score = torch.einsum("nhd,hcd->hnc", q.double(), keys) / q.shape[2] ** 0.5
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    exact = (weight @ values).transpose(0, 1).flatten(1)
    spread = (weight @ values.abs()).transpose(0, 1).flatten(1)
    assert_within(y, exact, UNIT * exact.abs() + 2 * UNIT * spread + 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (31, 1), (32, 6), (50, 7), (0, 40)])
def test_causal_attention_is_a_float64_softmax(
    kernels: CpuKernels, heads: int, kv_heads: int, head_dim: int, start: int, count: int
) -> None:
    cache, end = new_cache(kv_heads, head_dim), start + count
    qkv = normal(count, heads + 2 * kv_heads, head_dim)
    y = kernels.attention(
        qkv.flatten(1), no_rotation(96, head_dim), batch_of(Segment(1, start, count)), cache, 1
    )
    keys, values = cache.memory[1, :, 1, :, :end]
    seen = torch.arange(end) <= start + torch.arange(count)[:, None]
    assert_attends(y, qkv[:, :heads], keys, values, seen)


def test_tree_mask_hides_cells_and_segments_are_apart(kernels: CpuKernels) -> None:
    cache, tail = new_cache(2, 64), torch.eye(20, dtype=torch.bool)
    tail[:, 3] = True
    segments = (Segment(1, 25, 20, tail_mask=tail), Segment(0, 7, 2))
    qkv = normal(22, 18, 64)
    y = kernels.attention(qkv.flatten(1), no_rotation(96, 64), batch_of(*segments), cache, 0)
    seen = torch.cat((torch.ones(20, 25, dtype=torch.bool), tail), dim=1)
    assert_attends(y[:20], qkv[:20, :14], *cache.memory[0, :, 1, :, :45], seen)
    seen = torch.arange(9) <= torch.tensor([[7], [8]])
    assert_attends(y[20:], qkv[20:, :14], *cache.memory[0, :, 0, :, :9], seen)


def test_mask_over_fewer_rows_than_its_tail(kernels: CpuKernels) -> None:
    """Two new tokens that see some of four earlier scratch cells, as in a deeper tree level."""
    cache = new_cache(1, 32)
    tail = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], dtype=torch.bool)
    qkv = normal(2, 4, 32)
    batch = batch_of(Segment(0, 34, 2, tail_mask=tail))
    y = kernels.attention(qkv.flatten(1), no_rotation(96, 32), batch, cache, 0)
    seen = torch.cat((torch.ones(2, 30, dtype=torch.bool), tail), dim=1)
    assert_attends(y, qkv[:, :2], *cache.memory[0, :, 0, :, :36], seen)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS[:3])
def test_keys_are_rotated_as_hugging_face_does_and_only_their_cells_change(
    kernels: CpuKernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    cache, rope = new_cache(kv_heads, head_dim), rotation(96, head_dim)
    expected = cache.memory.clone()
    qkv = normal(3, heads + 2 * kv_heads, head_dim)
    key = qkv[None, :, heads : heads + kv_heads].transpose(1, 2).float()
    cos, sin = rope[:, None, 40:43].float()
    _, rotated = apply_rotary_pos_emb(key, key, cos, sin)
    expected[1, 0, 0, :, 40:43] = rotated[0].bfloat16()
    expected[1, 1, 0, :, 40:43] = qkv[:, heads + kv_heads :].transpose(0, 1)
    kernels.attention(qkv.flatten(1), rope, batch_of(Segment(0, 40, 3)), cache, 1)
    torch.testing.assert_close(cache.memory, expected, rtol=2 * UNIT, atol=2.0**-20)
    assert (cache.memory == expected).float().mean() > 0.999


def test_queries_are_rotated_like_keys(kernels: CpuKernels) -> None:
    """With q = k = rotations of one vector, scores depend on the distance of positions only."""
    cache, rope = new_cache(1, 64), rotation(96, 64)
    vector = normal(64)
    qkv = torch.stack((vector, vector, normal(64))).repeat(6, 1, 1)
    qkv[:, 2] = normal(6, 64)
    y = kernels.attention(qkv.flatten(1), rope, batch_of(Segment(0, 0, 6)), cache, 0)
    cos, sin = rope[:, None, None, :6].double().unbind(0)
    q = vector.double().expand(1, 1, 6, 64)
    rotated, _ = apply_rotary_pos_emb(q, q, cos[0], sin[0])
    exact = F.scaled_dot_product_attention(
        rotated, rotated, qkv[None, None, :, 2].double(), is_causal=True
    )
    torch.testing.assert_close(y.double(), exact[0, 0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_tokens_together_give_the_bits_of_tokens_one_by_one(
    kernels: CpuKernels, two_threads: CpuKernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    rope, first = rotation(96, head_dim), new_cache(kv_heads, head_dim)
    qkv = normal(40, (heads + 2 * kv_heads) * head_dim)
    start = 29
    alone_cache = first
    memory = first.memory.clone()
    alone = torch.cat([
        kernels.attention(
            qkv[i : i + 1], rope, batch_of(Segment(0, start + i, 1)), alone_cache, 0
        )
        for i in range(40)
    ])  # fmt: skip
    for backend in (kernels, two_threads):
        for rows in ROWS:
            mask = torch.ones(rows, rows, dtype=torch.bool).tril()
            for tail_mask in (None, mask):
                cache = new_cache(kv_heads, head_dim)
                cache.memory.copy_(memory)
                batch = batch_of(Segment(0, start, rows, tail_mask=tail_mask))
                y = backend.attention(qkv[:rows].contiguous(), rope, batch, cache, 0)
                assert torch.equal(y, alone[:rows]), f"{rows} rows, mask {tail_mask is not None}"


@pytest.mark.parametrize("window", [1, 5, 33, 40])
def test_windows_hide_the_oldest_cells(kernels: CpuKernels, window: int) -> None:
    cache, qkv = new_cache(2, 64), normal(40, 18, 64)
    batch = batch_of(Segment(1, 30, 40))
    y = kernels.attention(qkv.flatten(1), no_rotation(96, 64), batch, cache, 1, window=window)
    cell, position = torch.arange(70), 30 + torch.arange(40)[:, None]
    seen = (cell <= position) & (cell > position - window)
    assert_attends(y, qkv[:, :14], *cache.memory[1, :, 1, :, :70], seen)


def test_a_window_counts_along_a_trees_paths(kernels: CpuKernels) -> None:
    """Behind 34 settled cells: a chain 0-1-2 and node 3 beside node 2."""
    cache, qkv = new_cache(1, 32), normal(4, 4, 32)
    tail = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    segment = Segment(0, 34, 4, tail_mask=tail)
    batch = TokenBatch.pack([0] * 4, [34, 35, 36, 36], [segment])
    for window, seen_cells in (
        (2, ([33, 34], [34, 35], [35, 36], [35, 37])),
        (4, ([31, 32, 33, 34], [32, 33, 34, 35], [33, 34, 35, 36], [33, 34, 35, 37])),
    ):
        y = kernels.attention(qkv.flatten(1), no_rotation(96, 32), batch, cache, 0, window=window)
        seen = torch.zeros(4, 38, dtype=torch.bool)
        for row, cells in enumerate(seen_cells):
            seen[row, cells] = True
        assert_attends(y, qkv[:, :2], *cache.memory[0, :, 0, :, :38], seen)


def test_windowed_tokens_together_give_the_bits_of_tokens_one_by_one(kernels: CpuKernels) -> None:
    rope, memory = rotation(96, 64), new_cache(2, 64).memory
    qkv = normal(40, (14 + 2 * 2) * 64)

    def attend(start: int, rows: torch.Tensor, cache: KVCache) -> torch.Tensor:
        batch = batch_of(Segment(0, start, len(rows)))
        return kernels.attention(rows.contiguous(), rope, batch, cache, 0, window=37)

    alone, together = new_cache(2, 64), new_cache(2, 64)
    for cache in (alone, together):
        cache.memory.copy_(memory)
    want = torch.cat([attend(29 + i, qkv[i : i + 1], alone) for i in range(40)])
    assert torch.equal(attend(29, qkv, together), want)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS[:3])
def test_heads_are_normalised_before_they_are_rotated(
    kernels: CpuKernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    rope, plain, normed = rotation(96, head_dim), *(new_cache(kv_heads, head_dim) for _ in "ab")
    plain.memory.copy_(normed.memory)
    qkv, weights = normal(7, heads + 2 * kv_heads, head_dim), normal(2, head_dim)
    batch = batch_of(Segment(0, 40, 7))
    y = kernels.attention(
        qkv.flatten(1), rope, batch, normed, 0,
        query_norm=weights[0], key_norm=weights[1], eps=1e-3,
    )  # fmt: skip

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x.reshape(-1, head_dim), weight, 1e-3).view(x.shape)

    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    by_hand = torch.cat((norm(query, weights[0]), norm(key, weights[1]), value), dim=1)
    assert torch.equal(y, kernels.attention(by_hand.flatten(1), rope, batch, plain, 0))
    assert torch.equal(normed.memory, plain.memory)


def test_long_context_and_many_rows(kernels: CpuKernels) -> None:
    cache = new_cache(1, 64, cells=3000)
    qkv = normal(300, 3, 64)
    batch = batch_of(Segment(0, 2500, 300))
    y = kernels.attention(qkv.flatten(1), no_rotation(3000, 64), batch, cache, 0)
    seen = torch.arange(2800) <= 2500 + torch.arange(300)[:, None]
    assert_attends(y, qkv[:, :1], *cache.memory[0, :, 0, :, :2800], seen)


def test_cells_beyond_the_slot_are_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="cell 96 is outside the slot's 96 cells"):
        kernels.attention(
            normal(1, 3 * 64), no_rotation(96, 64), batch_of(Segment(0, 96, 1)), new_cache(1, 64), 0
        )


# ------------------------------------------------------------------------------------------ build


def test_a_second_load_compiles_nothing(
    kernels: CpuKernels, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(cache_dir.iterdir())
    monkeypatch.setattr(cpu_kernel_library.tempfile, "TemporaryDirectory", None)
    assert CpuKernels.load(cache_dir, amx=kernels.amx) is not None
    assert set(cache_dir.iterdir()) == before


def test_without_the_use_of_amx_there_are_vectors(
    kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(cache_dir: Path, amx: bool) -> Path:
        if amx:
            raise cpu_kernel_library.KernelsUnavailableError("unknown option -mamx-tile")
        return build_library(cache_dir, amx)

    build_library = cpu_kernel_library._build
    monkeypatch.setattr(cpu_kernel_library, "_build", without)
    loaded = CpuKernels.load(tmp_path)
    assert loaded is not None
    assert not loaded.amx


def test_no_compiler_is_a_reason_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernel_library, "_missing_features", lambda *_: [])
    monkeypatch.setattr(cpu_kernel_library.shutil, "which", lambda _: None)
    assert CpuKernels.load(tmp_path) is None
    assert "no C++ compiler" in (CpuKernels.unavailable_reason(tmp_path) or "")


def test_missing_cpu_features_are_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 fma avx512f avx512bw avx512dq avx512vl\n")
    needed = ("fma", "avx512_bf16", "avx512_vnni")
    assert cpu_kernel_library._missing_features(needed, cpuinfo) == ["avx512_bf16", "avx512_vnni"]
    assert cpu_kernel_library._missing_features(needed, tmp_path / "absent")[0] == "fma"


def test_failed_compilation_is_a_reason(
    kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("not C++")
    monkeypatch.setattr(cpu_kernel_library, "_SOURCE", broken)
    assert CpuKernels.load(tmp_path) is None
    assert "failed" in (CpuKernels.unavailable_reason(tmp_path) or "")
