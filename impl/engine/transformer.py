"""A lean decoder-only transformer for the Llama and Qwen2 families.

It runs packed batches of new tokens against a KV cache: single tokens, chunks of a prompt, and
trees of candidates are one and the same pass, told apart by the batch's segments. It knows nothing
about sampling, drafting or verifying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig
from impl.engine.kv_cache import KVCache
from impl.engine.operators import Linear, Norm, Operators, TorchOperators
from impl.engine.token_batch import TokenBatch


class _Take(Protocol):
    def __call__(self, name: str, *shape: int) -> torch.Tensor: ...


PREFILL_CHUNK = 256  # tokens of a prompt per pass: bounds scratch memory, keeps weights in use


@dataclass(frozen=True, slots=True)
class Layer:
    """The four linear layers of a transformer block, each with the norm in front of it."""

    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Transformer:
    """Weights ready to run.

    Attributes:
        config: the model's shape.
        head_ids: token id of each logit, int64 [logits]; None where logit i is token i. A draft
            whose head is trimmed to its most frequent tokens has fewer logits than tokens.
        weight_bytes: bytes of weights that a pass over one token reads (the floor of its time).
    """

    def __init__(
        self,
        config: TransformerConfig,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: Linear,
        head_ids: torch.Tensor | None,
        operators: Operators,
    ) -> None:
        self.config = config
        self.head_ids = head_ids
        self.operators = operators
        self.device, self.dtype = embedding.device, embedding.dtype
        self._embedding = embedding  # [vocabulary, hidden]
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._rope = config.rope_tables(self.dtype, self.device)

    @classmethod
    def from_weights(
        cls,
        config: TransformerConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_ids: torch.Tensor | None = None,
        operators: Operators | None = None,
    ) -> Transformer:
        """Builds the model from tensors under their Hugging Face names.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        operators = operators or TorchOperators()
        device = torch.device(device)

        def take(name: str, *shape: int) -> torch.Tensor:
            tensor = weights.get(name)
            if tensor is None:
                raise ModelError(f"weights: tensor {name!r} is missing")
            if tuple(tensor.shape) != shape:
                raise ModelError(f"weights: {name!r} is {list(tensor.shape)}, want {list(shape)}")
            return tensor.to(device=device, dtype=dtype)

        hidden = config.hidden_size
        embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        tied = config.tied_head or "lm_head.weight" not in weights
        head = embedding if tied else take("lm_head.weight", config.vocab_size, hidden)
        if head_ids is not None:
            head = head[head_ids.to(device)]
        return cls(
            config,
            embedding,
            [_build_layer(config, f"model.layers.{i}.", weights, take, operators)
             for i in range(config.layers)],
            Norm(take("model.norm.weight", hidden), config.norm_eps),
            operators.head(head),
            head_ids,
            operators,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one token."""
        linears = [x for la in self._layers for x in (la.qkv, la.output, la.gate_up, la.down)]
        return sum(linear.weight_bytes for linear in (*linears, self._head))

    @property
    def vocabulary(self) -> int:
        """Number of logits a pass returns for a token."""
        return self.config.vocab_size if self.head_ids is None else len(self.head_ids)

    def new_cache(self, slots: int, cells: int) -> KVCache:
        """Allocates the KV cache of `slots` sequences with `cells` cells each."""
        config = self.config
        return KVCache(
            layers=config.layers,
            slots=slots,
            kv_heads=config.kv_heads,
            cells=cells,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Feeds the batch, writes its keys and values, returns logits.

        Args:
            batch: N new tokens.
            cache: read behind and written at each segment's cells; its lengths are not changed.
            rows: which of the N rows need logits.

        Returns:
            float32 logits [rows, logits]; see `head_ids` for the token ids.
        """
        x = self._run_layers(batch, cache)
        return self._head(x[rows], norm=self._final_norm)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """Feeds `tokens` to an empty slot in chunks and settles them; computes no logits."""
        cache.truncate(slot, 0)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            self._run_layers(TokenBatch.causal([(slot, start, chunk)], self.device), cache)
            cache.truncate(slot, start + len(chunk))

    def _run_layers(self, batch: TokenBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states [N, hidden] behind the last block."""
        attention, rope = self.operators.attention, self._rope
        # A draft padded to fewer ids than its target may be fed one that it lacks: no real token.
        x = self._embedding[batch.tokens.clamp(max=len(self._embedding) - 1)]
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(x, norm=layer.attention_norm)
            x = layer.output(attention(qkv, rope, batch, cache, i), residual=x)
            x = layer.down(layer.gate_up(x, norm=layer.mlp_norm), residual=x)
        return x


def _build_layer(
    config: TransformerConfig,
    prefix: str,
    weights: Mapping[str, torch.Tensor],
    take: _Take,
    operators: Operators,
) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def bias(name: str, size: int) -> torch.Tensor | None:
        return take(name, size) if name in weights else None

    projections = (("q_proj", query), ("k_proj", key), ("v_proj", key))
    qkv = torch.cat([take(f"{attention}{name}.weight", size, hidden) for name, size in projections])
    biases = [bias(f"{attention}{name}.bias", size) for name, size in projections]
    present = [part for part in biases if part is not None]
    return Layer(
        Norm(take(f"{prefix}input_layernorm.weight", hidden), config.norm_eps),
        operators.linear(qkv, torch.cat(present) if present else None),
        operators.linear(
            take(f"{attention}o_proj.weight", hidden, query),
            bias(f"{attention}o_proj.bias", hidden),
        ),
        Norm(take(f"{prefix}post_attention_layernorm.weight", hidden), config.norm_eps),
        operators.swiglu(
            take(f"{mlp}gate_proj.weight", inner, hidden),
            take(f"{mlp}up_proj.weight", inner, hidden),
        ),
        operators.linear(
            take(f"{mlp}down_proj.weight", hidden, inner), bias(f"{mlp}down_proj.bias", hidden)
        ),
    )
