"""Attention of a padded batch: flash-attn for causal passes where it is installed, else SDPA.

Masked passes (trees, branches, padded rows) go through SDPA. Both read keys and values where they
are in the cache; nothing here depends on how far a sequence has come, so a pass can be recorded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from impl.engine.kv_cache import KVCache
from impl.engine.operators import Attention, normalised_heads, rotate
from impl.engine.padded_batch import PaddedBatch

Fuse = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


def flash_attention() -> Any | None:
    """flash-attn's attention over a KV cache; None where it is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache


class PaddedAttention:
    """Normalises and rotates q and k, writes k and v to the cache, attends."""

    def __init__(self, *, flash: Any | None, fuse: Fuse) -> None:
        """Args: `flash` is what `flash_attention` gives; `fuse` compiles a function, or not."""
        self._flash = flash
        self._rotated = fuse(rotated)

    def __call__(
        self, qkv: torch.Tensor, how: Attention, batch: PaddedBatch, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """See `Operators.attention`; qkv and the result have the S * n padded rows."""
        memory, shape = cache.memory[layer], batch.shape
        kv_heads, head_dim = memory.shape[2], memory.shape[4]
        heads = self._rotated(
            qkv.view(len(qkv), -1, head_dim), batch.rotary(how.rope), kv_heads, how
        ).view(shape.sequences, shape.rows, -1, head_dim)
        query, written = heads[:, :, : -2 * kv_heads], heads[:, :, -2 * kv_heads :]
        if self._flash is not None and shape.exact and not shape.tail:
            output = self._attend_causally(query, written, how, batch, memory)
        else:
            pair = written.view(*batch.cells.shape, 2, kv_heads, head_dim)  # keys and values
            memory[:, batch.slots[:, None], :, batch.cells] = pair
            output = _attend_masked(query, how, batch, memory)
        return output.reshape(len(qkv), -1)

    def _attend_causally(
        self,
        query: torch.Tensor,
        written: torch.Tensor,
        how: Attention,
        batch: PaddedBatch,
        memory: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = memory.transpose(2, 3)  # [slots, cells, kv_heads, D]
        new_keys, new_values = written.chunk(2, dim=2)
        window = (-1, -1) if how.window is None else (how.window - 1, 0)
        output: torch.Tensor = self._flash(  # type: ignore[misc]  # asked for where it is there
            query,
            keys,
            values,
            new_keys,
            new_values,
            cache_seqlens=batch.starts.int(),
            cache_batch_idx=batch.slots.int(),
            softmax_scale=how.scale,
            causal=True,
            window_size=window,
        )
        return output


def rotated(heads: torch.Tensor, rope: torch.Tensor, kv_heads: int, how: Attention) -> torch.Tensor:
    """Queries and keys normalised and rotated, values as they are: [N, heads + 2 kv_heads, D]."""
    sizes = [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
    query, key, value = torch.split(heads, sizes, dim=1)
    query = rotate(normalised_heads(query, how.query_norm), rope)
    key = rotate(normalised_heads(key, how.key_norm), rope)
    return torch.cat((query, key, value), dim=1)


def _attend_masked(
    query: torch.Tensor, how: Attention, batch: PaddedBatch, memory: torch.Tensor
) -> torch.Tensor:
    """SDPA of query [S, n, heads, D] over memory [2, slots, kv_heads, cells, D].

    The query heads that share a key head are folded into the query length.
    """
    shape, kv_heads, head_dim = batch.shape, memory.shape[2], memory.shape[4]
    group = query.shape[2] // kv_heads
    by_key = (shape.sequences, shape.rows, kv_heads, group, head_dim)
    seen = memory[:, :, :, : shape.length]
    if shape.first_slot is None:
        keys, values = seen.index_select(1, batch.slots)
    else:
        keys, values = seen[:, shape.first_slot : shape.first_slot + shape.sequences]
    folded = query.reshape(by_key).transpose(1, 2).flatten(2, 3)
    mask = batch.mask(how.window, group, query.dtype)
    output = F.scaled_dot_product_attention(folded, keys, values, mask, scale=how.scale)
    return output.view(shape.sequences, kv_heads, shape.rows, group, head_dim).transpose(1, 2)
