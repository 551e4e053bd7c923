"""Prompts: a dataset's records -> prompts picked by seed -> token ids, the same for every method.

A dataset is an entry of the registry, or a JSONL file of the user's own. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.dataset_sources import (
    Dataset,
    DatasetRegistry,
    Places,
    Row,
    jsonl_rows,
    load_registry,
    read_rows,
    template_fields,
)
from harness.errors import DatasetError, ModelError, UsageError
from harness.messages import describe, unknown
from harness.prompt_split import Split, holds, prompt_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as a conversation whose next turn is the model's.

    Attributes:
        index: row in the dataset, whatever was picked of it.
        category: what per-category figures group by; the dataset's name where it has none.
        messages: a plain prompt is a single user message.
    """

    index: int
    category: str
    messages: tuple[Message, ...]

    @property
    def sha256(self) -> str:
        """Identity of its words, which decides whether it is a tuning prompt; roles apart."""
        return prompt_sha256(m.content for m in self.messages if m.role != "system")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts picked from a dataset, in the order in which they are run.

    Attributes:
        name: the dataset's name; the stem of a file of the user's own.
        sha256: of every prompt of the dataset (not only those picked), whatever its source.
        source: where it was read, in words.
        licence: the dataset's licence; "unknown" for a file of the user's own.
        available: how many prompts the split has; may be fewer than were asked for.
        prompts: those picked.
    """

    name: str
    sha256: str
    source: str
    licence: str
    available: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, chat template and BOS applied; empty ids for an empty prompt."""

    index: int
    category: str
    ids: tuple[int, ...]


class _OwnRow(BaseModel):
    """A line of the user's own JSONL file; further fields are theirs and ignored."""

    model_config = ConfigDict(frozen=True)

    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    category: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs the field 'prompt' or the field 'messages', one of them")
        return self


def load_prompts(
    name: str,
    count: int | None = None,
    *,
    seed: int = 0,
    split: Split = "all",
    registry: DatasetRegistry | None = None,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
) -> PromptSet:
    """Reads a dataset and picks prompts from it.

    The pick is seeded and stable: the first 8 of 32 are the 8, and categories take turns.

    Args:
        name: a dataset of the registry, or the path of a file that ends in `.jsonl` with `prompt`
            (or `messages`) and, if wished, `category` on each line.
        count: how many; None is all. A dataset with fewer gives what it has.
        seed: of the pick.
        split: which side to pick from (`harness.prompt_split`): results come from "evaluation".
        registry: default: the shipped one.
        data_dir: mirror folder of JSONL files.
        cache_dir: of the hub's files; None is Hugging Face's own.
        offline: do not ask the hub.

    Raises:
        UsageError: no such dataset.
        DatasetError: no source has it, it is altered or malformed, or the split has none of it.
    """
    if name.endswith(".jsonl"):
        path = Path(name)
        name, source, licence = path.stem, str(path), "unknown"
        prompts = _own_prompts(path)
    else:
        known = (registry or load_registry()).datasets
        if name not in known:
            raise UsageError(unknown("dataset", name, known, see="harness datasets"))
        licence = known[name].licence
        prompts, source = _registered_prompts(
            name, known[name], Places(data_dir=data_dir, cache_dir=cache_dir, offline=offline)
        )
    held = [prompt for prompt in prompts if holds(split, prompt.sha256)]
    if not held:
        raise DatasetError(
            f"{source}: none of its {len(prompts)} prompts is in the {split} split; "
            "add prompts, or take them all with --split all"
        )
    return PromptSet(
        name=name,
        sha256=_prompts_sha256(prompts),
        source=source,
        licence=licence,
        available=len(held),
        prompts=tuple(_in_seeded_order(held, seed)[:count]),
    )


def encode_prompts(
    prompt_set: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: bool = True,
    system: str | None = None,
) -> tuple[EncodedPrompt, ...]:
    """Token ids of the prompts, the same for every method of a run.

    Args:
        prompt_set: what to encode.
        tokenizer: the pair's.
        template: apply the tokenizer's chat template, once, up to the model's turn; False takes
            the text as it is, with BOS where the tokenizer has one.
        system: system message in front of each conversation that has none of its own; None leaves
            it to the template, which may put in its own (`template_preamble` shows it).

    Raises:
        ModelError: a template is asked for and the tokenizer has none.
        DatasetError: the template refuses a conversation, or one of several messages is to be
            encoded without it.
    """
    if template and not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template: use --raw")
    return tuple(
        EncodedPrompt(
            prompt.index,
            prompt.category,
            _encode(
                prompt, tokenizer, template, system, f"{prompt_set.name} prompt {prompt.index}"
            ),
        )
        for prompt in prompt_set.prompts
    )


def template_preamble(tokenizer: PreTrainedTokenizerBase, system: str | None) -> str:
    """What the chat template puts in front of the user's first words, its own system message too.

    Raises:
        ModelError: the tokenizer has no chat template, or one without room for the user's words.
    """
    if not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template: use --raw")
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    turns = _conversation((Message(role="user", content=mark),), system)
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    preamble, found, _ = text.partition(mark)
    if not found:
        raise ModelError("the tokenizer's chat template drops the user's message")
    return preamble


def ids_sha256(encoded: Iterable[EncodedPrompt]) -> str:
    """Identity of encoded prompts: sha256 of one line `INDEX ID ID ...` for each, in order."""
    digest = hashlib.sha256()
    for prompt in encoded:
        digest.update((" ".join(map(str, (prompt.index, *prompt.ids))) + "\n").encode())
    return digest.hexdigest()


def _registered_prompts(name: str, dataset: Dataset, places: Places) -> tuple[list[Prompt], str]:
    rows, source = read_rows(name, dataset, places)
    prompts = [
        Prompt(index, _fill(dataset.category, row), _user(_fill(dataset.prompt, row)))
        for index, row in enumerate(rows)
    ]
    return prompts, source


def _own_prompts(path: Path) -> list[Prompt]:
    prompts = []
    for index, row in enumerate(jsonl_rows(path)):
        try:
            own = _OwnRow.model_validate(row.fields)
        except ValidationError as error:
            raise DatasetError(f"{row.where}: {describe(error, _OwnRow.model_fields)}") from error
        messages = own.messages if own.prompt is None else _user(own.prompt)
        prompts.append(Prompt(index, own.category or path.stem, messages or ()))
    if not prompts:
        raise DatasetError(f"{path}: has no prompts")
    return prompts


def _fill(template: str, row: Row) -> str:
    for name in template_fields(template):
        if not isinstance(row.fields.get(name), str):
            raise DatasetError(f"{row.where}: field {name!r} must be a text")
    return template.format_map(row.fields)


def _user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def _in_seeded_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """A seeded permutation in which the categories take turns; its prefixes do not move."""

    def draw(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.index}".encode()).digest()

    turns: Counter[str] = Counter()
    ranked = []
    for prompt in sorted(prompts, key=draw):
        ranked.append((turns[prompt.category], prompt))
        turns[prompt.category] += 1
    return [prompt for _, prompt in sorted(ranked, key=lambda turn: (turn[0], turn[1].category))]


def _prompts_sha256(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        turns = [[message.role, message.content] for message in prompt.messages]
        digest.update(json.dumps([prompt.index, prompt.category, turns]).encode() + b"\n")
    return digest.hexdigest()


def _encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    template: bool,
    system: str | None,
    where: str,
) -> tuple[int, ...]:
    if not any(message.content for message in prompt.messages):
        return ()
    if template:
        ids = _template_ids(_conversation(prompt.messages, system), tokenizer, where)
    elif len(prompt.messages) == 1:
        ids = tokenizer(prompt.messages[0].content)["input_ids"]
    else:
        raise DatasetError(
            f"{where}: has several messages, which needs the chat template: no --raw"
        )
    bos = tokenizer.bos_token_id
    doubled = bos is not None and ids[:2] == [bos, bos]
    return tuple(ids[1:] if doubled else ids)


def _conversation(messages: tuple[Message, ...], system: str | None) -> list[dict[str, str]]:
    turns = [message.model_dump() for message in messages]
    if system is not None and messages[0].role != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _template_ids(
    turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    from jinja2 import TemplateError

    try:
        return list(
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        )
    except TemplateError as error:
        raise DatasetError(f"{where}: the chat template refuses it: {error}") from error
