"""A lean decoder-only transformer for the families of `architecture`.

It runs packed batches of new tokens against a KV cache: single tokens, chunks of a prompt, and
trees of candidates are one and the same pass, told apart by the batch's segments. It knows nothing
about sampling, drafting or verifying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from impl.engine.architecture import TransformerConfig
from impl.engine.kv_cache import KVCache
from impl.engine.layer import Checkpoint, Layer, build_layer
from impl.engine.operators import Attention, Linear, Norm, Operators, TorchOperators
from impl.engine.token_batch import TokenBatch

Attend = Callable[[torch.Tensor, Attention, int], torch.Tensor]  # q, k, v; how; which layer

PREFILL_CHUNK = 256  # tokens of a prompt per pass: bounds scratch memory, keeps weights in use


class Transformer:
    """Weights ready to run; see `impl.engine.language_model.LanguageModel`.

    Attributes:
        config: the model's shape.
        operators: what the layers are computed with.
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
        self._embedding_scale: float | None = None
        if config.family.scaled_embedding:  # rounded to the weights' dtype, as Hugging Face does
            self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))

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
            ModelError: a tensor is missing, has the wrong shape, or belongs to another model.
        """
        operators = operators or TorchOperators()
        checkpoint = Checkpoint(weights, config, dtype, torch.device(device))
        size = (config.vocab_size, config.hidden_size)
        embedding = checkpoint.take("model.embed_tokens.weight", *size)
        tied = config.tied_head or "lm_head.weight" not in checkpoint
        head = embedding if tied else checkpoint.take("lm_head.weight", *size)
        ropes = {
            rope: rope.table(config.head_dim, config.max_position, dtype, checkpoint.device)
            for rope in dict.fromkeys(attention.rope for attention in config.attention)
        }
        layers = [
            build_layer(checkpoint, i, ropes[attention.rope], operators)
            for i, attention in enumerate(config.attention)
        ]
        final_norm = checkpoint.norm("model.norm", config.hidden_size)
        checkpoint.refuse_unused()
        if head_ids is not None:
            head_ids = head_ids.to(checkpoint.device)
            head = head[head_ids]
        return cls(config, embedding, layers, final_norm, operators.head(head), head_ids, operators)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one token."""
        linears = [x for la in self._layers for x in (la.qkv, la.output, la.gate_up, la.down)]
        return sum(linear.weight_bytes for linear in (*linears, self._head))

    @property
    def max_position(self) -> int:
        """Most tokens of one sequence."""
        return self.config.max_position

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in its pass."""
        return self.operators.batch_invariant

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
        """See `LanguageModel.forward`."""
        return self._logits(self._run(batch, cache)[rows])

    @torch.inference_mode()
    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel.prefill`."""
        cache.truncate(slot, 0)
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            self._run(TokenBatch.causal([(slot, start, chunk)]), cache)
            cache.truncate(slot, start + len(chunk))

    def _run(self, batch: TokenBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states [N, hidden] behind the last block."""
        attention = self.operators.attention
        return self._run_layers(
            batch.tokens, lambda qkv, how, i: attention(qkv, how, batch, cache, i)
        )

    def _run_layers(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        # A draft padded to fewer ids than its target may be fed one that it lacks: no real token.
        x = self._embedding[tokens.clamp(max=len(self._embedding) - 1)]
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(x, norm=layer.attention_norm)
            x = layer.output(attend(qkv, layer.attention, i), residual=x)
            x = layer.down(layer.gate_up(x, norm=layer.mlp_norm), residual=x)
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, logits] of hidden states [n, hidden]."""
        return self._head(x, norm=self._final_norm)
