"""The models of a pair, loaded once a process; specs travel to worker processes, weights do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from harness.decoder import DecoderSetup
from harness.errors import ModelError
from impl.engine.architecture import TransformerConfig
from impl.engine.backends import Choice, choose_operators
from impl.engine.cpu_kernels import Quantization
from impl.engine.emulated_model import EmulatedModel, Latency
from impl.engine.language_model import LanguageModel
from impl.engine.loader import load_transformer, model_size, read_config
from impl.engine.synthetic_model import Coin, SyntheticModel

if TYPE_CHECKING:
    from impl.engine.tensor_parallel.rank_group import RankGroup
    from impl.engine.transformer import Transformer

Engine = Literal["lean", "hf"]


class Execution(NamedTuple):
    """What a model's layers are computed with on this machine.

    Attributes:
        operators: name of the backend.
        why_not_kernels: of the lean engine, why it is not the fused CPU kernels; None if it is.
    """

    operators: str
    why_not_kernels: str | None


class RankPlace(NamedTuple):
    """Where a process that has a part of a model runs: a device by its torch name, and cores."""

    device: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to load a model.

    Attributes:
        folder: weights in Hugging Face layout.
        dtype: of weights and activations, by its torch name.
        head_size: keep only the logits of this many most frequent tokens (a draft's trimmed head);
            None keeps all.
        quantization: of the linear layers where the CPU kernels run them, "int8" or "int4" (with an
            int8 head); a draft's option. None keeps `dtype`.
        kernel_dir: where compiled CPU kernels are kept; None runs on PyTorch alone.
        vocab_limit: drop the logits of ids from here on (a draft padded beyond its target).
        engine: "lean" is this engine's own layers, "hf" those of transformers.
        latency: what a pass is made to take (emulated devices); None is its own time.
        device: where it runs, by its torch name.
        other_ranks: where the other processes run among which each of its layers is shared out;
            none where it is whole on `device`.
        random: weights are made up, of the shape that the folder's config says; it has none. A
            trimmed head keeps the lowest ids then.
        coin: what decides which tokens target and draft agree on; None is their weights.
    """

    folder: Path
    dtype: str = "bfloat16"
    head_size: int | None = None
    quantization: Quantization | None = None
    kernel_dir: Path | None = None
    vocab_limit: int | None = None
    engine: Engine = "lean"
    latency: Latency | None = None
    device: str = "cpu"
    other_ranks: tuple[RankPlace, ...] = ()
    random: bool = False
    coin: Coin | None = None

    def load(self) -> LanguageModel:
        """Reads, or makes up, and packs the weights."""
        model = self._load()
        if self.coin is not None:
            model = SyntheticModel(model, self.coin)
        return model if self.latency is None else EmulatedModel(model, self.latency)

    def _load(self) -> LanguageModel:
        if self.engine == "hf":
            from impl.engine.huggingface_model import HuggingFaceModel

            dtype = getattr(torch, self.dtype)
            return HuggingFaceModel.load(
                self.folder, dtype=dtype, device=self.device, head_ids=self.head_ids()
            )
        if self.other_ranks:
            from impl.engine.tensor_parallel.model import TensorParallelModel

            return TensorParallelModel(self)
        return self.load_part(None)

    def load_part(self, group: RankGroup | None) -> Transformer:
        """The lean engine's model, or the part of it that a rank of this group has on `device`."""
        return load_transformer(
            self.folder,
            dtype=getattr(torch, self.dtype),
            device=self.device,
            head_ids=self.head_ids(),
            operators=self._choose_operators().operators,
            group=group,
            random=self.random,
        )

    def execution(self) -> Execution:
        """What the layers are computed with.

        Raises:
            ModelError: the engine lacks them, or cannot share them out among so many ranks.
        """
        if self.engine == "hf":
            return Execution("transformers", None)
        if self.other_ranks:
            from impl.engine.tensor_parallel.sharding import shard_config

            shard_config(TransformerConfig.from_hf(read_config(self.folder)), self.ranks)
        operators, why_not_kernels = self._choose_operators()
        return Execution(operators.name, why_not_kernels)

    @property
    def ranks(self) -> int:
        """Among how many processes each of its layers is shared out."""
        return 1 + len(self.other_ranks)

    def _choose_operators(self) -> Choice:
        return choose_operators(
            TransformerConfig.from_hf(read_config(self.folder)),
            getattr(torch, self.dtype),
            quantization=self.quantization,
            kernel_dir=self.kernel_dir,
            device=self.device,
        )

    def width(self) -> int:
        """How many logits the model has."""
        ids = self.head_ids()
        return model_size(self.folder, "vocab_size") if ids is None else len(ids)

    def head_ids(self) -> torch.Tensor | None:
        """Token id of each logit, ascending; None when no logit is dropped."""
        size = model_size(self.folder, "vocab_size")
        limit = min(size, self.vocab_limit or size)
        ids = None
        if self.head_size and self.random:
            limit = min(limit, self.head_size)
        elif self.head_size:
            from impl.engine.draft_vocab import draft_vocab

            ids = draft_vocab(self.folder, self.head_size)
        if ids is None:
            return None if limit == size else torch.arange(limit)
        return ids[ids < limit]


class Models:
    """The harness's model provider for in-house methods."""

    def __init__(self, target: ModelSpec, draft: ModelSpec | None = None) -> None:
        self.target_spec = target
        self._draft_spec = draft
        self._loaded: dict[ModelSpec, LanguageModel] = {}

    def target(self) -> LanguageModel:
        """The target, loaded at the first call."""
        return self._load(self.target_spec)

    def draft(self) -> LanguageModel:
        """The draft beside the target, loaded at the first call.

        Raises:
            ModelError: the pair has none.
        """
        return self._load(replace(self.draft_spec, device=self.target_spec.device))

    @property
    def draft_spec(self) -> ModelSpec:
        """What a worker process loads; never proposes an id that the target cannot embed."""
        if self._draft_spec is None:
            raise ModelError("draft: this pair has no draft model; choose another pair or method")
        return self._draft_spec

    @property
    def target_folder(self) -> Path:
        """See `harness.decoder.ModelProvider`."""
        return self.target_spec.folder

    @property
    def draft_folder(self) -> Path | None:
        """See `harness.decoder.ModelProvider`."""
        return None if self._draft_spec is None else self._draft_spec.folder

    def _load(self, spec: ModelSpec) -> LanguageModel:
        if spec not in self._loaded:
            self._loaded[spec] = spec.load()
        return self._loaded[spec]


def draft_spec_of(setup: DecoderSetup) -> ModelSpec:
    """The draft's spec for a worker process. Raises `ModelError` for a foreign model provider."""
    if not isinstance(setup.models, Models):
        raise ModelError("models: this method starts a draft process and needs impl.engine.Models")
    return setup.models.draft_spec
