"""The registry of datasets: what each is called, where it is and how its prompts are made."""

from __future__ import annotations

from pathlib import Path
from string import Formatter
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from harness.dataset_sources import AnySource, Frozen
from harness.errors import UsageError
from harness.messages import describe

Template = Annotated[str, Field(min_length=1)]
FieldName = Annotated[str, Field(min_length=1)]


class Dataset(Frozen):
    """A registry entry: exactly one of `prompt`, `turns` and `conversation` makes its prompts.

    Attributes:
        description: one line for `harness datasets`.
        licence: of the prompts.
        prompt: template of the user's message over the fields of a record, as `str.format`.
        turns: the field that lists the user's messages of a conversation; a prompt for each.
        conversation: the field that lists messages of a role and a text each; the prompt is what
            comes before the first answer.
        lengths: tokens that prompts are cut to by the target's tokenizer, a prompt of each length
            for every record.
        cut: the field of `prompt` that is cut, and continued by the records after where too short.
        category: template of the category; without a field in it, a constant.
        categories: category -> what it is called here, for those that are called otherwise.
        rows: only the first so many records count; None is all of them.
        sources: tried in this order.
    """

    description: str
    licence: str
    prompt: Template | None = None
    turns: FieldName | None = None
    conversation: FieldName | None = None
    lengths: tuple[Annotated[int, Field(ge=16)], ...] = ()
    cut: FieldName | None = None
    category: Template
    categories: dict[str, str] = Field(default={})
    rows: Annotated[int, Field(ge=1)] | None = None
    sources: Annotated[tuple[AnySource, ...], Field(min_length=1)]

    @field_validator("prompt", "category")
    @classmethod
    def _names_plain_fields(cls, template: str | None) -> str | None:
        odd = [name for name in template_fields(template or "") if not name.isidentifier()]
        if odd:
            raise ValueError(f"'{{{odd[0]}}}' is no field name; double the braces of literal ones")
        return template

    @model_validator(mode="after")
    def _one_way_to_make_prompts(self) -> Self:
        ways = [self.prompt, self.turns, self.conversation]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("needs one of prompt, turns and conversation")
        if bool(self.lengths) != (self.cut is not None):
            raise ValueError("lengths and cut belong together")
        if self.cut is not None and template_fields(self.prompt or "").count(self.cut) != 1:
            raise ValueError(f"cut: prompt must hold '{{{self.cut}}}' once")
        return self

    @property
    def pinned(self) -> bool:
        """Whether every source is held by a checksum or a commit."""
        return all(source.pinned for source in self.sources)


class DatasetRegistry(Frozen):
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
