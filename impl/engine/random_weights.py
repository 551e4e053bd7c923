"""Weights of a model's shape that mean nothing, for timing passes where no weights are at hand.

Names and shapes are those of transformers' own model, built without memory. A tensor is made when
it is asked for and kept by nobody here, so that a large model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from zlib import crc32

import torch

from harness.errors import ModelError

_STD = 0.02  # of a fresh model in transformers
_POOL = 1_000_003  # numbers drawn; a prime, so that no two rows of a matrix are alike


class RandomWeights(Mapping[str, torch.Tensor]):
    """Tensors by their Hugging Face names: norms are 1, all else is normal with deviation 0.02.

    Attributes:
        shapes: of each.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self.shapes = shapes
        drawn = torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
        self._pool = (_STD * drawn).to(dtype)

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype) -> RandomWeights:
        """Of the model that a folder's `config.json` describes; raises `ModelError`."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder}: transformers cannot build its config ({error})") from error
        return cls({name: tensor.shape for name, tensor in model.state_dict().items()}, dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=self._pool.dtype)
        start = crc32(name.encode()) % _POOL
        count = start + shape.numel()
        return self._pool.repeat(count // _POOL + 1)[start:count].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
