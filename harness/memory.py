"""How much memory a pair needs, worked out from its shape before anything is downloaded.

A synchronous method drafts on the target's first device, an asynchronous one on the draft's own. So
the target's first device holds both models, and the draft's device the draft once more; on a CPU
both are the host's memory. Several devices have equal shares of a target, and its embedding each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from harness.decoder import Placement
from harness.errors import ModelError, UsageError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_HOST = "host"
WORKING_BYTES = 1 << 30  # of a process beside weights and KV: PyTorch, activations, buffers


class Shape(BaseModel):
    """The sizes that decide a decoder-only transformer's memory, as in its `config.json`.

    Attributes:
        tied: the output head is the embedding.
        qkv_bias: the attention projections have biases (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab: int = Field(gt=0)
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> Shape:
        """From the `config.json` of a folder in Hugging Face layout; raises `ModelError`."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            heads = config["num_attention_heads"]
            return cls(
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
                tied=config.get("tie_word_embeddings", False),
                qkv_bias=config["model_type"] == "qwen2",
                qk_norm=config["model_type"] == "qwen3",
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder}: no usable config.json ({error!r})") from error

    @property
    def parameters(self) -> int:
        """Numbers stored, a head that is not tied included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * q + 2 * self.hidden * kv
        extras = (q + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + extras + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def kv_bytes(self, dtype: str, tokens: int) -> int:
        """Keys and values of so many tokens, all sequences together."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]
        return per_token * tokens


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """What one copy of a model takes.

    Attributes:
        parameters: numbers stored.
        weight_bytes: in the pair's dtype; quantisation would take less.
        kv_bytes: for the context and batch asked for.
        embedding_bytes: of the weights, what each of several devices has all of.
    """

    parameters: int
    weight_bytes: int
    kv_bytes: int
    embedding_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Weights and KV together."""
        return self.weight_bytes + self.kv_bytes

    def share(self, devices: int) -> int:
        """Bytes of weights and KV on each of so many devices, at most."""
        return self.bytes if devices == 1 else self.embedding_bytes + -(-self.bytes // devices)


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What is asked of a device, and what it has.

    Attributes:
        device: `host` or `cuda:N`.
        holds: what is there, in words.
        need_bytes: working memory included.
        available_bytes: free now.
    """

    device: str
    holds: str
    need_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        """Whether what is free is enough."""
        return self.need_bytes <= self.available_bytes


def model_need(shape: Shape, dtype: str, context: int, batch_size: int) -> ModelNeed:
    """What one copy of a model takes in a run with so many slots of so many tokens."""
    if context < 1 or batch_size < 1:
        raise UsageError("context and batch size must be at least 1")
    parameters = shape.parameters
    size = DTYPE_BYTES[dtype]
    kv_bytes = shape.kv_bytes(dtype, context * batch_size)
    return ModelNeed(parameters, parameters * size, kv_bytes, shape.vocab * shape.hidden * size)


def device_needs(
    target: ModelNeed,
    draft: ModelNeed | None,
    available: Mapping[str, int],
    placement: Placement | None = None,
) -> tuple[DeviceNeed, ...]:
    """What each device has to hold.

    Args:
        target: one copy of it.
        draft: one copy of it; None for a pair without.
        available: free bytes of each device, `host` among them; GPUs in order.
        placement: which devices the models are on; None is the first GPU for the target and the
            second for the draft, as far as there are any.
    """
    targets, drafts = _devices(available, placement)
    holds: dict[str, list[str]] = {}
    needs: dict[str, int] = {}

    def put(device: str, what: str, size: int) -> None:
        holds.setdefault(device, []).append(what)
        needs[device] = needs.get(device, 0) + size

    of = f" (one of {len(targets)} shares)" if len(targets) > 1 else ""
    for device in targets:
        put(device, f"target{of}", target.share(len(targets)) + WORKING_BYTES)
    if draft:
        put(targets[0], "draft", draft.bytes)
        for device in drafts:
            put(device, "draft in its own process", draft.bytes + WORKING_BYTES)
    return tuple(
        DeviceNeed(device, ", ".join(holds[device]), need, available.get(device, 0))
        for device, need in needs.items()
    )


def _devices(
    available: Mapping[str, int], placement: Placement | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the target, and of the draft's processes."""
    if placement is None:
        gpus = [name for name in available if name != _HOST] or [_HOST]
        return (gpus[0],), (gpus[min(1, len(gpus) - 1)],)

    def places(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_HOST if name == "cpu" else name for name in names)

    return places(placement.target_devices), places(placement.draft_devices)


def available_memory() -> dict[str, int]:
    """Free bytes of the host (its container's limit counts) and of each GPU."""
    import psutil
    import torch

    free = {_HOST: min(psutil.virtual_memory().available, _container_limit())}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free[f"cuda:{index}"] = int(torch.cuda.mem_get_info(index)[0])
    return free


def _container_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    try:
        limit, used = ((root / f"memory.{name}").read_text() for name in ("max", "current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return 1 << 62
