"""The GPU's way of running a model, on the CPU: padded passes over fixed memory, both attentions.

flash-attn is stood in for by plain arithmetic with its documented arguments; a recorded pass is run
again instead of being replayed.
"""

from __future__ import annotations

import pytest
import torch
from tiny_architectures import CHECKS, SIZES, VARIANTS, Twins, build, tokens_of
from transformers import LlamaConfig

from impl.engine.gpu_operators import GpuOperators
from impl.engine.gpu_transformer import RECORDED_ROWS, GpuTransformer, _lengths
from impl.engine.padded_batch import PaddedBatch, PaddedInputs, PaddedShape
from impl.engine.token_batch import Segment, TokenBatch


def plain_flash(  # the names are flash-attn's
    q, k_cache, v_cache, k, v, *, cache_seqlens, cache_batch_idx, softmax_scale, causal, window_size
):
    """`flash_attn.flash_attn_with_kvcache`: appends k and v in place, aligns to the last cell."""
    assert causal
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    outputs = []
    for i, (start, slot) in enumerate(
        zip(cache_seqlens.tolist(), cache_batch_idx.tolist(), strict=True)
    ):
        count = q.shape[1]
        k_cache[slot, start : start + count] = k[i]
        v_cache[slot, start : start + count] = v[i]
        group = q.shape[2] // k.shape[2]
        keys = k_cache[slot, : start + count].repeat_interleave(group, dim=1)
        values = v_cache[slot, : start + count].repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,chd->hnc", q[i], keys) * softmax_scale
        row = torch.arange(start, start + count)[:, None]
        cell = torch.arange(start + count)
        seen = cell <= row
        if window_size[0] >= 0:
            seen &= cell >= row - window_size[0]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnc,chd->nhd", weights, values))
    return torch.stack(outputs)


def build_gpu(config, flash=None) -> Twins:
    return build(config, GpuTransformer, GpuOperators(flash=flash, fused=False))


@pytest.fixture(scope="module")
def llama():
    return build_gpu(LlamaConfig(**SIZES))


OF_EACH_KIND = ["Llama 3.x", "Mistral, sliding window", "Qwen2", "Qwen3", "Gemma 3 text", "OLMo2"]


@pytest.fixture(scope="module", params=OF_EACH_KIND)
def twins(request):
    return build_gpu(VARIANTS[request.param])


@pytest.fixture(scope="module", params=["Llama 3.x", "Mistral, sliding window"])
def flash_twins(request):
    return build_gpu(VARIANTS[request.param], plain_flash)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_padded_passes_equal_transformers(check, twins):
    assert check(twins) < 1e-4


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_passes_with_flash_attention_equal_transformers(check, flash_twins):
    assert check(flash_twins) < 1e-4


def test_a_causal_pass_goes_to_flash_attention_and_a_tree_does_not():
    calls = []

    def counting(*args, **kwargs):
        calls.append(args[0].shape[:2])
        return plain_flash(*args, **kwargs)

    twins = build_gpu(LlamaConfig(**SIZES), counting)
    cache = twins.ours.new_cache(2, 64)
    twins.feed(cache, [(0, 0, [1, 2, 3]), (1, 0, [4, 5, 6])])
    assert set(calls) == {(2, 3)}
    calls.clear()
    tree = torch.tensor([[1, 0], [0, 1]]).bool()
    twins.ours.forward(TokenBatch.pack([7, 8], [3, 3], [Segment(0, 3, 2, tree)]), cache)
    twins.feed(cache, [(0, 3, [1]), (1, 3, [2, 3])])  # rows of padding
    assert calls == []


def test_a_step_is_recorded_once_for_every_length_and_then_run_again(llama):
    cache = llama.ours.new_cache(2, 600)
    tokens = tokens_of(300)
    assert cache.cells == 640  # whole steps of 64
    llama.ours.prefill(cache, 0, tokens[:254])
    want = llama.want(tokens)
    for i in range(254, 259):  # across the first length
        got = llama.feed(cache, [(0, i, tokens[i : i + 1])])
        torch.testing.assert_close(got[0], want[i], atol=1e-4, rtol=0)
        assert sorted(shape.length for shape in llama.ours._passes[cache]) == [256, 512, 640]
    assert [_lengths(cells) for cells in (64, 256, 257, 2048)] == [
        [64],
        [256],
        [256, 257],
        [256, 512, 1024, 2048],
    ]


def test_logits_outlive_the_next_pass(llama):
    cache = llama.ours.new_cache(1, 64)
    first = llama.feed(cache, [(0, 0, [1, 2])])
    kept = first.clone()
    llama.feed(cache, [(0, 2, [3, 4])])
    assert torch.equal(first, kept)


def test_what_was_recorded_over_a_cache_goes_with_it(llama):
    batch = TokenBatch.causal([(0, 0, [1])])
    llama.ours.forward(batch, llama.ours.new_cache(1, 64))
    before = len(llama.ours._passes)
    cache = llama.ours.new_cache(1, 64)
    llama.ours.forward(batch, cache)
    assert len(llama.ours._passes) == before + 1


def test_rows_that_are_padding_write_and_see_what_the_last_row_does():
    """Three rows at cells 5 to 7 of slot 2, then one at cell 9 of slot 0, padded to four each."""
    batch = TokenBatch.causal([(2, 5, [11, 12, 13]), (0, 9, [21])])
    shape = PaddedShape.of(batch.segments, rows=4, length=12)
    assert shape == PaddedShape(2, 4, 12, 0, None, exact=False)
    padded = PaddedBatch.over(PaddedInputs.of(batch, shape), shape)
    assert padded.tokens.tolist() == [11, 12, 13, 13, 21, 21, 21, 21]
    assert padded.positions.tolist() == [5, 6, 7, 7, 9, 9, 9, 9]
    assert padded.cells.tolist() == [[5, 6, 7, 7], [9, 9, 9, 9]]
    assert (padded.slots.tolist(), padded.starts.tolist()) == ([2, 0], [5, 9])
    seen = (padded.mask(None, 1, torch.float32)[:, 0] == 0).sum(-1)
    assert seen.tolist() == [[6, 7, 8, 8], [10, 10, 10, 10]]
    windowed = (padded.mask(3, 2, torch.float32)[1, 0] == 0).int()
    assert windowed.tolist() == [[0] * 7 + [1] * 3 + [0] * 2] * 8  # two heads to a key


def test_a_tree_mask_is_that_of_its_segment():
    tail = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    segments = (Segment(0, 6, 3, tail), Segment(1, 2, 2))
    batch = TokenBatch.pack([1, 2, 3, 4, 5], [6, 7, 7, 2, 3], segments)
    shape = PaddedShape.of(segments, rows=3, length=16)
    padded = PaddedBatch.over(PaddedInputs.of(batch, shape), shape)
    for window in (None, 2):
        mask = padded.mask(window, 1, torch.float32)[:, 0] == 0
        assert torch.equal(mask[0, :, :9], segments[0].visible(window))
        assert torch.equal(mask[1, :2, :4], segments[1].visible(window))
        assert not mask[0, :, 9:].any()
        assert not mask[1, :, 4:].any()


def test_passes_larger_than_a_step_are_not_recorded(llama):
    cache, tokens = llama.ours.new_cache(1, 128), tokens_of(RECORDED_ROWS[-1] + 1)
    got = llama.feed(cache, [(0, 0, tokens)])
    torch.testing.assert_close(got, llama.want(tokens), atol=1e-4, rtol=0)
    assert cache not in llama.ours._passes


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize(
    ("flash", "fused", "name"),
    [(None, False, "gpu-sdpa"), (plain_flash, True, "gpu-flash-attn-fused")],
)
def test_the_operators_are_named_by_what_they_use(flash, fused, name):
    assert GpuOperators(flash=flash, fused=fused).name == name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("variant", ["Llama 3.x", "Gemma 3 text", "OLMo2"])
def test_compiled_operators_equal_transformers(variant):
    twins = build(VARIANTS[variant], GpuTransformer, GpuOperators(flash=None, fused=True))
    assert all(check(twins) < 1e-4 for check in CHECKS)
