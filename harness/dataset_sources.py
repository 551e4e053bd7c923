"""Where a dataset's file can be read from: beside the registry, a package, a mirror, a repository.

A source finds a file and says what pins it; `harness.dataset_files` reads and checks it. Knows
records, not prompts.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from harness.cache import FirstUse, default_cache_dir
from harness.dataset_files import MOST_BYTES, AbsentSourceError, Pin, Row, pinned_rows
from harness.errors import DatasetError, HubError
from harness.messages import first_line
from harness.relative_paths import RelativePath

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Repo = Annotated[RelativePath, Field(pattern=r"^[\w.-]+/[\w.-]+$")]

_TIMEOUT_S = 10.0


class Frozen(BaseModel):
    """Unknown fields are errors, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Places:
    """Where sources outside the installation may look.

    Attributes:
        data_dir: mirror folder; may also hold snapshots of the hub.
        cache_dir: of downloads and of the record of first uses.
        offline: ask nothing but this machine.
    """

    data_dir: Path | None = None
    cache_dir: Path = field(default_factory=default_cache_dir)
    offline: bool = False


class Source(Frozen, ABC):
    """One place that a dataset can be read from.

    Attributes:
        renamed: field of a record -> where this source has it, such as `turns.0` for the first of
            the list `turns`; the fields that are not named here are called alike.
    """

    renamed: dict[str, str] = Field(default={})

    @abstractmethod
    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        """The files, fetched where need be.

        Raises:
            AbsentSourceError: not to be had here.
        """

    @property
    @abstractmethod
    def pinned(self) -> bool:
        """Whether a checksum or a commit holds its content."""

    @abstractmethod
    def __str__(self) -> str:
        """The source in words."""

    def rows(self, places: Places, most: int | None = None) -> list[Row]:
        """The records, in the files' order; only the first `most` of each file.

        Raises:
            DatasetError: not here, altered or malformed.
        """
        files = self.files(places)
        rows = [row for path, pin in files for row in pinned_rows(path, pin, most)][:most]
        return [self._with_names(row) for row in rows] if self.renamed else rows

    def _with_names(self, row: Row) -> Row:
        found = {name: _at(row.fields, place) for name, place in self.renamed.items()}
        return Row(row.where, {**row.fields, **found})

    def _pin(
        self, sha256: str | None, places: Places, *, path: str = "", by_commit: bool = False
    ) -> Pin:
        return Pin(sha256, by_commit, f"{self} {path}".strip(), FirstUse(places.cache_dir))


class PinnedFile(Frozen):
    """A file next to the registry that lists it, pinned by its checksum."""

    path: Path
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _beside_registry(cls, path: Path, info: ValidationInfo) -> Path:
        return Path((info.context or {}).get("root", "")) / path


class ShippedSource(Source):
    """Files that lie beside the registry."""

    kind: Literal["shipped"]
    listed: Annotated[tuple[PinnedFile, ...], Field(min_length=1, alias="files")]

    @property
    def pinned(self) -> bool:
        return True

    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        return [(file.path, self._pin(file.sha256, places)) for file in self.listed]

    def __str__(self) -> str:
        return "shipped"


class PackageSource(Source):
    """A data file of an installed PyPI package, whose code is never imported."""

    kind: Literal["package"]
    distribution: str
    version: str
    path: RelativePath
    sha256: Sha256

    @property
    def pinned(self) -> bool:
        return True

    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        try:
            installed = metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError as error:
            raise AbsentSourceError(f"{self} is not installed") from error
        path = Path(str(installed.locate_file(self.path)))
        return [(path, self._pin(self.sha256, places))]

    def __str__(self) -> str:
        return f"package {self.distribution}=={self.version}"


class MirrorSource(Source):
    """A file of the mirror folder (`--data-dir`)."""

    kind: Literal["mirror"]
    path: RelativePath
    sha256: Sha256 | None = None

    @property
    def pinned(self) -> bool:
        return self.sha256 is not None

    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        if places.data_dir is None:
            raise AbsentSourceError(f"{self}: no --data-dir given")
        path = places.data_dir / self.path
        if not path.exists():
            raise AbsentSourceError(f"{path}: no such file")
        return [(path, self._pin(self.sha256, places))]

    def __str__(self) -> str:
        return f"mirror {self.path}"


class GithubSource(Source):
    """A file of a public GitHub repository, pinned by the commit it is read at."""

    kind: Literal["github"]
    repo: Repo
    revision: Commit
    path: RelativePath
    sha256: Sha256 | None = None

    @property
    def pinned(self) -> bool:
        return True

    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        cached = places.cache_dir / "datasets" / self.repo / self.revision / self.path
        if not cached.exists():
            if places.offline:
                raise AbsentSourceError(f"{self}: offline")
            self._download(cached)
        return [(cached, self._pin(self.sha256, places, by_commit=True))]

    def _download(self, path: Path) -> None:
        url = f"https://raw.githubusercontent.com/{self.repo}/{self.revision}/{self.path}"
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                content = answer.read(MOST_BYTES + 1)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
        except (OSError, urllib.error.URLError) as error:
            raise AbsentSourceError(f"{self}: {first_line(error)}") from error
        unfinished.replace(path)

    def __str__(self) -> str:
        return f"github {self.repo}@{self.revision[:12]}"


class HubSource(Source):
    """A data file of a Hugging Face dataset, pinned by its checksum or the commit it is read at."""

    kind: Literal["hub"]
    repo: Repo
    revision: Commit | None = None
    path: RelativePath
    sha256: Sha256 | None = None

    @property
    def pinned(self) -> bool:
        return self.sha256 is not None or self.revision is not None

    def files(self, places: Places) -> list[tuple[Path, Pin]]:
        path = self._snapshot(places) or self._fetched(places)
        by_commit = self.revision is not None
        return [(path, self._pin(self.sha256, places, path=self.path, by_commit=by_commit))]

    def _snapshot(self, places: Places) -> Path | None:
        """The file in a copy of the repository under `--data-dir`, as the hub's cache keeps it."""
        if places.data_dir is None:
            return None
        snapshots = places.data_dir / f"datasets--{self.repo.replace('/', '--')}" / "snapshots"
        revisions = [self.revision] if self.revision else sorted(p.name for p in _listed(snapshots))
        found = [path for r in revisions if (path := snapshots / r / self.path).is_file()]
        return found[0] if found else None

    def _fetched(self, places: Places) -> Path:
        from huggingface_hub import hf_hub_download

        from harness import hub

        get = partial(hf_hub_download, self.repo, self.path, repo_type="dataset")
        try:
            return hub.fetch(
                self.repo, self.revision or "main", get, repo_type="dataset", offline=places.offline
            )
        except HubError as error:
            raise AbsentSourceError(f"{self}: {first_line(error)}") from error

    def __str__(self) -> str:
        return f"hub {self.repo}@{(self.revision or 'main')[:12]}"


AnySource = Annotated[
    ShippedSource | PackageSource | MirrorSource | GithubSource | HubSource,
    Field(discriminator="kind"),
]


class Loaded(BaseModel):
    """A dataset's records and where they came from."""

    model_config = ConfigDict(frozen=True)

    rows: tuple[Row, ...]
    source: str
    pinned: bool


def read_rows(name: str, sources: tuple[Source, ...], most: int | None, places: Places) -> Loaded:
    """The records of the first source that is here.

    Raises:
        DatasetError: no source has it, or the first that has it is altered or malformed.
    """
    absent = []
    for source in sources:
        try:
            return Loaded(
                rows=tuple(source.rows(places, most)), source=str(source), pinned=source.pinned
            )
        except AbsentSourceError as error:
            absent.append(str(error))
    raise DatasetError(f"dataset {name!r} has no source here: {'; '.join(absent)}")


def _at(value: Any, place: str) -> Any:
    """What a record holds at a place such as `turns.0`; None where it holds nothing."""
    for step in place.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal():
            value = dict(enumerate(value)).get(int(step))
        else:
            return None
    return value


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
