"""Reads a model from a folder in Hugging Face layout, and turns a GGUF file into such a folder.

Nothing from a model repository is ever executed: weights are safetensors (never pickled `.bin`
files), a tokenizer is its `tokenizer.json`, and `trust_remote_code` is never set.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from impl.engine.operators import Operators
    from impl.engine.tensor_parallel.rank_group import RankGroup
    from impl.engine.transformer import Transformer

_CONVERSION_VERSION = 1  # raise it when a conversion would write something else for one file

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_INDEX = "model.safetensors.index.json"
_SINGLE_SHARD = "model.safetensors"
_CONVERSION_RECORD = "converted_from.json"


@dataclass(frozen=True, slots=True)
class WeightSize:
    """How many numbers a model stores, and in how many bytes."""

    parameters: int
    bytes: int


def prepare(source: Path, cache_dir: Path) -> Path:
    """Gives a model as a folder in Hugging Face layout.

    A folder is checked and returned as it is. A GGUF file is converted to bfloat16 safetensors
    once and kept in the cache under its SHA-256; other processes see that folder only when whole.

    Raises:
        ModelError: neither a folder with config and safetensors nor a GGUF file we can convert.
    """
    if source.is_dir():
        read_config(source)
        _shards(source)
        return source
    if not source.is_file():
        raise ModelError(f"{source}: no such model; give a Hugging Face folder or a .gguf file")
    if source.suffix.lower() != ".gguf":
        raise ModelError(f"{source}: not a model; give a Hugging Face folder or a .gguf file")
    try:
        return _converted(source, cache_dir)
    except OSError as error:
        raise ModelError(
            f"{source}: its conversion cannot be written to {cache_dir} "
            f"({error.strerror or error}); free some space or choose another cache directory"
        ) from error


def conversion_folder(sha256: str, cache_dir: Path) -> Path:
    """Where the conversion of the GGUF file with this sum is, once it is made."""
    return cache_dir / "converted" / f"v{_CONVERSION_VERSION}" / sha256


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    return _read_json(folder / _CONFIG)


def model_size(folder: Path, name: str) -> int:
    """A size that every model has, by transformers' name for it, such as `vocab_size`.

    Raises:
        ModelError: neither the config nor transformers knows it.
    """
    if isinstance(size := read_config(folder).get(name), int):
        return size
    from transformers import AutoConfig  # some families have names of their own, or nest it

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return int(getattr(config.get_text_config(), name))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}: its {_CONFIG} gives no {name}; fetch it again") from error


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors by their Hugging Face names, mapped from disk without a copy.

    Raises:
        ModelError: a shard is missing, damaged, outside the folder or lacks a tensor of the index.
    """
    from safetensors import SafetensorError, safe_open

    weights: dict[str, torch.Tensor] = {}
    for shard, expected in _shards(folder).items():
        try:
            with safe_open(shard, framework="pt") as tensors:
                stored = set(tensors.keys())
                if absent := sorted(set(expected) - stored):
                    raise ModelError(f"{shard}: lacks {absent[0]}; fetch the model again")
                weights |= {name: tensors.get_tensor(name) for name in expected or stored}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{shard}: damaged ({error}); fetch the model again") from error
    return weights


def weight_size(folder: Path) -> WeightSize:
    """Counts what the folder stores, from the headers of its shards alone."""
    parameters = size = 0
    for shard in _shards(folder):
        for tensor in _safetensors_header(shard).values():
            start, end = tensor["data_offsets"]
            parameters += math.prod(tensor["shape"])
            size += end - start
    return WeightSize(parameters, size)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The folder's tokenizer, exactly as its `tokenizer.json` describes it."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / _TOKENIZER).is_file():
        raise ModelError(f"{folder}: no {_TOKENIZER}; save the model with its fast tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def load_transformer(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    head_ids: torch.Tensor | None = None,
    operators: Operators | None = None,
    group: RankGroup | None = None,
    random: bool = False,
) -> Transformer:
    """The folder's model, ready to run.

    Args:
        folder: what `prepare` returned; with `random` all that it needs is a config.
        dtype: of weights and computation.
        device: where it runs.
        head_ids: token ids [n] that the output head is trimmed to; None keeps them all.
        operators: what the layers are computed with; None is the engine's default on a CPU.
        group: the ranks that share the model; this one's part is loaded. None is all of it.
        random: make the weights up instead of reading them.
    """
    from impl.engine.architecture import TransformerConfig
    from impl.engine.gpu_operators import GpuOperators
    from impl.engine.gpu_transformer import GpuTransformer
    from impl.engine.random_weights import RandomWeights
    from impl.engine.transformer import Transformer

    config = TransformerConfig.from_hf(read_config(folder))
    weights: Mapping[str, torch.Tensor] = (
        RandomWeights.of(folder, dtype) if random else read_weights(folder)
    )
    if group is not None:
        from impl.engine.operators import TorchOperators
        from impl.engine.tensor_parallel.operators import RankOperators
        from impl.engine.tensor_parallel.sharding import ShardedWeights, shard_config

        if operators is None or isinstance(operators, GpuOperators):
            operators = TorchOperators()  # the ranks' sums are in no recorded pass
        config = shard_config(config, group.size)
        weights = ShardedWeights(weights, group.rank, group.size)
        operators = RankOperators(operators, group)
    engine = GpuTransformer if isinstance(operators, GpuOperators) else Transformer
    return engine.from_weights(
        config,
        weights,
        dtype=dtype,
        device=device,
        head_ids=head_ids,
        operators=operators,
    )


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a generation: those of the generation config and of the config, together.

    The tokenizer's `eos_token` counts only where neither names one.
    """
    ids: set[int] = set()
    for path in (folder / _GENERATION_CONFIG, folder / _CONFIG):
        eos = _read_json(path).get("eos_token_id") if path.is_file() else None
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not ids and (eos := load_tokenizer(folder).eos_token_id) is not None:
        ids.add(eos)
    return frozenset(ids)


def file_sha256(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a file, remembered in the cache for as long as its size and time stand still."""
    path = path.resolve()
    status = path.stat()
    identity: dict[str, str | int] = {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    key = hashlib.sha256(str(path).encode()).hexdigest()
    record = cache_dir / "sha256" / f"{key}.json"
    if remembered := _remembered_sha256(record, identity):
        return remembered
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_atomically(record, json.dumps({**identity, "sha256": digest}))
    return digest


def weights_sha256(folder: Path, cache_dir: Path) -> str:
    """What identifies the weights of a folder.

    A converted folder answers with the SHA-256 of the GGUF file it came from, a folder of one shard
    with the shard's, and one of several with that of their listing as `sha256sum` prints it.
    """
    record = folder / _CONVERSION_RECORD
    if record.is_file():
        return str(_read_json(record)["sha256"])
    sums = {shard.name: file_sha256(shard, cache_dir) for shard in sorted(_shards(folder))}
    if len(sums) == 1:
        return next(iter(sums.values()))
    listing = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    return hashlib.sha256(listing.encode()).hexdigest()


def _converted(source: Path, cache_dir: Path) -> Path:
    """The converted folder of a GGUF file; one process converts, the others wait for it."""
    from filelock import FileLock

    digest = file_sha256(source, cache_dir)
    folder = conversion_folder(digest, cache_dir)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{digest}.lock")):
        if not folder.is_dir():
            _convert(source, folder, digest)
    return folder


def _convert(source: Path, folder: Path, digest: str) -> None:
    """Converts beside `folder` and renames at the end, so that `folder` only ever exists whole."""
    from impl.engine.gguf_conversion import convert

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed process left
    unfinished.mkdir()
    try:
        convert(source, unfinished)
        record = json.dumps({"file": source.name, "sha256": digest})
        (unfinished / _CONVERSION_RECORD).write_text(record, encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Shard -> the tensors that the index expects in it (empty without an index: all there are)."""
    if (folder / _INDEX).is_file():
        return _indexed_shards(folder / _INDEX)
    if (folder / _SINGLE_SHARD).is_file():
        return {folder / _SINGLE_SHARD: []}
    if any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder}: has only pickled .bin weights, which are never loaded because a pickle can "
            "run code; save the model as safetensors"
        )
    raise ModelError(f"{folder}: no {_SINGLE_SHARD} and no {_INDEX}; give a folder that has one")


def _indexed_shards(index: Path) -> dict[Path, list[str]]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map; fetch the model again")
    shards: dict[Path, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise ModelError(
                f"{index}: weight_map puts {tensor} into {name!r}, which is no file of this "
                "folder; fetch the model from a source you trust"
            )
        shards.setdefault(index.parent / name, []).append(tensor)
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{shard}: this shard of the index is missing; fetch the model again")
    return shards


def _safetensors_header(shard: Path) -> dict[str, Any]:
    """Tensor name -> `dtype`, `shape` and `data_offsets` (start, end) of a safetensors file."""
    try:
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, OverflowError) as error:
        raise ModelError(f"{shard}: damaged ({error}); fetch the model again") from error
    header.pop("__metadata__", None)
    return dict(header)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the model again")
    return content


def _remembered_sha256(record: Path, identity: dict[str, str | int]) -> str | None:
    """The recorded sum if the record describes this very state of the file."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        digest = str(known.pop("sha256"))
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # absent or damaged: hash again
    return digest if known == identity else None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that other processes see whole or not at all; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
