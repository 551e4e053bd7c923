"""Where datasets are: the registry, and the sources that a dataset's records are read from.

The sources of a dataset are tried in order and the first that is there is read; one whose checksum
differs is an error, never passed over. Knows records, not prompts.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from harness.errors import DatasetError, UsageError
from harness.messages import describe, first_line

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(NamedTuple):
    """A record of a dataset file; `where` names it in errors."""

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Places:
    """Where sources outside the installation may look; see `load_prompts`."""

    data_dir: Path | None = None
    cache_dir: Path | None = None
    offline: bool = False


class _AbsentSourceError(DatasetError):
    """This source is not to be had here; the next one is tried."""


class Source(_Frozen, ABC):
    """One place that a dataset can be read from."""

    @abstractmethod
    def rows(self, places: Places) -> list[Row]:
        """Every record, in the file's order.

        Raises:
            DatasetError: not here, altered or malformed.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The source in words."""


class PinnedFile(_Frozen):
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
    files: Annotated[tuple[PinnedFile, ...], Field(min_length=1)]

    def rows(self, places: Places) -> list[Row]:  # noqa: ARG002
        return [row for file in self.files for row in _pinned_rows(file.path, file.sha256)]

    def __str__(self) -> str:
        return "shipped"


class PackageSource(Source):
    """A data file of an installed PyPI package, whose code is never imported."""

    kind: Literal["package"]
    distribution: str
    version: str
    path: str
    sha256: Sha256

    def rows(self, places: Places) -> list[Row]:  # noqa: ARG002
        try:
            installed = metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError as error:
            raise _AbsentSourceError(f"{self} is not installed") from error
        return _pinned_rows(Path(str(installed.locate_file(self.path))), self.sha256)

    def __str__(self) -> str:
        return f"package {self.distribution}=={self.version}"


class MirrorSource(Source):
    """A JSONL file of the mirror folder (`--data-dir`)."""

    kind: Literal["mirror"]
    path: str
    sha256: Sha256

    def rows(self, places: Places) -> list[Row]:
        if places.data_dir is None:
            raise _AbsentSourceError(f"{self}: no --data-dir given")
        return _pinned_rows(places.data_dir / self.path, self.sha256)

    def __str__(self) -> str:
        return f"mirror {self.path}"


class HubSource(Source):
    """A data file of a Hugging Face dataset, pinned by the commit it is read at."""

    kind: Literal["hub"]
    repo: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    path: str

    def rows(self, places: Places) -> list[Row]:
        if places.offline:
            raise _AbsentSourceError(f"{self}: offline")
        from datasets import load_dataset

        try:
            table = load_dataset(
                self.repo,
                data_files=self.path,
                revision=self.revision,
                split="train",
                cache_dir=None if places.cache_dir is None else str(places.cache_dir),
            )
        except Exception as error:  # whatever the hub's client raises
            raise _AbsentSourceError(f"{self}: {first_line(error)}") from error
        return [Row(f"{self.repo}/{self.path} row {i}", fields) for i, fields in enumerate(table)]

    def __str__(self) -> str:
        return f"hub {self.repo}@{self.revision[:12]}"


AnySource = Annotated[
    ShippedSource | PackageSource | MirrorSource | HubSource, Field(discriminator="kind")
]


class Dataset(_Frozen):
    """A registry entry.

    Attributes:
        description: one line for `harness datasets`.
        licence: of the prompts.
        prompt: template of the user's message over the fields of a record, as `str.format`.
        category: the same for the category; without a field in it, a constant.
        rows: only the first so many records count; None is all of them.
        sources: tried in this order.
    """

    description: str
    licence: str
    prompt: str
    category: str
    rows: Annotated[int, Field(ge=1)] | None = None
    sources: Annotated[tuple[AnySource, ...], Field(min_length=1)]

    @field_validator("prompt", "category")
    @classmethod
    def _names_plain_fields(cls, template: str) -> str:
        odd = [name for name in template_fields(template) if not name.isidentifier()]
        if odd:
            raise ValueError(f"'{{{odd[0]}}}' is no field name; double the braces of literal ones")
        return template


class DatasetRegistry(_Frozen):
    """Dataset name -> where it is and how its prompts are made."""

    datasets: dict[str, Dataset]


def datasets_root() -> Path:
    """The folder of `registry.yaml`: packaged with a wheel, `datasets/` in a checkout."""
    packaged = Path(__file__).parent / "_datasets"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "datasets"


def load_registry(extra: Path | None = None) -> DatasetRegistry:
    """The shipped datasets and those of another file of the same form.

    Args:
        extra: a YAML file; its `shipped` files are relative to it.

    Raises:
        UsageError: unreadable or invalid file, or a dataset that is already shipped.
    """
    shipped = _read_registry(datasets_root() / "registry.yaml")
    if extra is None:
        return shipped
    added = _read_registry(extra)
    for name in added.datasets.keys() & shipped.datasets.keys():
        raise UsageError(f"{extra}: datasets.{name} is shipped already; choose another name")
    return DatasetRegistry(datasets={**shipped.datasets, **added.datasets})


def read_rows(name: str, dataset: Dataset, places: Places) -> tuple[list[Row], str]:
    """The dataset's records, and in words the source that had them.

    Raises:
        DatasetError: no source has it, or the first that has it is altered or malformed.
    """
    absent = []
    for source in dataset.sources:
        try:
            return source.rows(places)[: dataset.rows], str(source)
        except _AbsentSourceError as error:
            absent.append(str(error))
    raise DatasetError(f"dataset {name!r} has no source here: {'; '.join(absent)}")


def jsonl_rows(path: Path) -> list[Row]:
    """The records of a JSONL file (UTF-8; blank lines are passed over).

    Raises:
        DatasetError: absent, unreadable or malformed; the message has file and line.
    """
    return _parse(path, _file_bytes(path))


def template_fields(template: str) -> list[str]:
    """The fields of a record that a template of `Dataset` names."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _read_registry(path: Path) -> DatasetRegistry:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return DatasetRegistry.model_validate(values, context={"root": path.parent})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {describe(error, Dataset.model_fields)}") from error


def _pinned_rows(path: Path, sha256: str) -> list[Row]:
    content = _file_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DatasetError(f"{path}: sha256 is {found}, the registry expects {sha256}")
    return _parse(path, gzip.decompress(content) if path.suffix == ".gz" else content)


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _AbsentSourceError(f"{path}: no such file") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(path: Path, content: bytes) -> list[Row]:
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise DatasetError(f"{where}: is no JSON in UTF-8: {first_line(error)}") from error
        if not isinstance(fields, dict):
            raise DatasetError(f"{where}: must be a JSON object")
        rows.append(Row(where, fields))
    return rows
