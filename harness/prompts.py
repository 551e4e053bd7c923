"""Prompts: a dataset's records -> conversations -> those picked by seed.

A dataset is an entry of the registry, or a JSONL file of the user's own. Knows no model;
`harness.encoding` makes token ids of prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.cache import default_cache_dir
from harness.dataset_files import Row, jsonl_rows
from harness.dataset_registry import Dataset, DatasetRegistry, load_registry, template_fields
from harness.dataset_sources import Loaded, Places, read_rows
from harness.errors import DatasetError, UsageError
from harness.messages import describe, unknown
from harness.prompt_split import Split, holds, prompt_sha256

Role = Literal["system", "user", "assistant"]

_ROLES: dict[Any, Role] = {  # as chat APIs and ShareGPT call them
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
_CUT_IDENTITY = 128  # characters of a text that is cut that identify it
_CHARACTERS_PER_TOKEN = 8  # at most, in running text: so much of a text is kept for each token


class Message(BaseModel):
    """One turn of a conversation.

    Attributes:
        role: whose turn it is.
        content: None for an assistant's turn that the target is yet to write, which it does once a
            run (`harness.reference_turns`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    content: str | None

    @model_validator(mode="after")
    def _only_answers_are_open(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: only an assistant's may be null")
        return self


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of the last message that is shortened until the prompt has a number of tokens.

    Attributes:
        start: of the stretch, in characters of the message; it loses characters at its end.
        end: behind the stretch.
        tokens: of the encoded prompt, at most.
    """

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as a conversation whose next turn is the model's.

    Attributes:
        index: place among the dataset's prompts, whatever was picked of them.
        category: what per-category figures group by; the dataset's name where it has none.
        messages: a plain prompt is a single user message.
        cut: of a prompt of a given length.
    """

    index: int
    category: str
    messages: tuple[Message, ...]
    cut: Cut | None = None

    @property
    def sha256(self) -> str:
        """Identity of its words, which decides whether it is a tuning prompt; roles apart.

        All turns of a conversation have that of the first, and all lengths of a text one too, so
        that they are on one side.
        """
        spoken = (message.content for message in self.messages if message.role != "system")
        end = None if self.cut is None else self.cut.start + _CUT_IDENTITY
        return prompt_sha256((text or "")[:end] for text in takewhile(_is_written, spoken))


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
        pinned: whether a checksum or a commit holds the source to its content.
    """

    name: str
    sha256: str
    source: str
    licence: str
    available: int
    prompts: tuple[Prompt, ...]
    pinned: bool = True


class _OwnRow(BaseModel):
    """A line of the user's own JSONL file; further fields are theirs and ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1, strict=False)] | None = None
    turns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    category: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if sum(form is not None for form in (self.prompt, self.messages, self.turns)) != 1:
            raise ValueError("needs the field 'prompt', 'messages' or 'turns', one of them")
        if self.messages is not None and self.messages[-1].role != "user":
            raise ValueError("messages: the last must be the user's, for the model to answer")
        return self

    def conversations(self) -> list[tuple[Message, ...]]:
        """One for each prompt of the line."""
        if self.turns is not None:
            return _after_each_turn(self.turns)
        return [self.messages or (_user(self.prompt or ""),)]


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
        name, source, licence, pinned = path.stem, str(path), "unknown", True
        prompts = _own_prompts(path)
    else:
        known = (registry or load_registry()).datasets
        if name not in known:
            raise UsageError(unknown("dataset", name, known, see="harness datasets"))
        places = Places(data_dir, default_cache_dir(cache_dir), offline)
        loaded = read_rows(name, known[name].sources, known[name].rows, places)
        source, licence, pinned = loaded.source, known[name].licence, loaded.pinned
        prompts = _registered_prompts(known[name], loaded)
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
        pinned=pinned,
    )


def _registered_prompts(dataset: Dataset, loaded: Loaded) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, row in enumerate(loaded.rows):
        category = _fill(dataset.category, row)
        category = dataset.categories.get(category, category)
        for made in _prompts_of(dataset, loaded.rows, number):
            prompts.append(replace(made, index=len(prompts), category=made.category or category))
    return prompts


def _prompts_of(dataset: Dataset, rows: Sequence[Row], number: int) -> list[Prompt]:
    """The prompts of a record; without a category where they have the record's."""
    row = rows[number]
    if dataset.turns is not None:
        turns = _texts(row, dataset.turns)
        return [Prompt(0, "", messages) for messages in _after_each_turn(turns)]
    if dataset.conversation is not None:
        opening = _opening(row, dataset.conversation)
        return [Prompt(0, "", opening)] if any(turn.role == "user" for turn in opening) else []
    if dataset.cut is not None:
        return [_of_length(dataset, rows, number, tokens) for tokens in dataset.lengths]
    return [Prompt(0, "", (_user(_fill(dataset.prompt or "", row)),))]


def _of_length(dataset: Dataset, rows: Sequence[Row], number: int, tokens: int) -> Prompt:
    """A prompt with enough of the records' texts to fill so many tokens; its category says them."""
    cut, template = dataset.cut or "", dataset.prompt or ""
    text = _text_from(rows, number, cut, _CHARACTERS_PER_TOKEN * tokens)
    before, after = template.split(f"{{{cut}}}")
    start = len(_fill(before, rows[number]))
    whole = _fill(before, rows[number]) + text + _fill(after, rows[number])
    length = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return Prompt(0, length, (_user(whole),), Cut(start, start + len(text), tokens))


def _text_from(rows: Sequence[Row], number: int, name: str, characters: int) -> str:
    """The text of a record, continued by those of the records after it where it is too short."""
    text = ""
    for step in range(len(rows)):
        text += ("\n\n" if text else "") + _text(rows[(number + step) % len(rows)], name)
        if len(text) >= characters:
            break
    return text[:characters]


def _own_prompts(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str | int, str] = {}
    for row in jsonl_rows(path):
        try:
            own = _OwnRow.model_validate(row.fields)
        except ValidationError as error:
            raise DatasetError(f"{row.where}: {describe(error, _OwnRow.model_fields)}") from error
        if own.id is not None and (first := seen.setdefault(own.id, row.where)) != row.where:
            raise DatasetError(f"{row.where}: id {own.id!r} is already that of {first}")
        for messages in own.conversations():
            prompts.append(Prompt(len(prompts), own.category or path.stem, messages))
    if not prompts:
        raise DatasetError(f"{path}: has no prompts")
    return prompts


def _fill(template: str, row: Row) -> str:
    return template.format_map({name: _text(row, name) for name in template_fields(template)})


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str):
        raise DatasetError(f"{row.where}: field {name!r} must be a text")
    return value


def _texts(row: Row, name: str) -> list[str]:
    value = row.fields.get(name)
    if not (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
        raise DatasetError(f"{row.where}: field {name!r} must be a list of texts")
    return value


def _after_each_turn(turns: Sequence[str]) -> list[tuple[Message, ...]]:
    """A conversation up to each of the user's turns; the target is yet to write the answers."""
    answer = Message(role="assistant", content=None)
    messages = [message for turn in turns for message in (_user(turn), answer)]
    return [tuple(messages[: 2 * turn + 1]) for turn in range(len(turns))]


def _opening(row: Row, name: str) -> tuple[Message, ...]:
    """What comes before the first answer of a stored conversation."""
    value: Any = row.fields.get(name)
    if not isinstance(value, list):
        raise DatasetError(f"{row.where}: field {name!r} must be a list of messages")
    opening = []
    for number, turn in enumerate(value):
        fields = turn if isinstance(turn, dict) else {}
        role = _ROLES.get(fields.get("role", fields.get("from")))
        content = fields.get("content", fields.get("value"))
        if role is None or not isinstance(content, str):
            raise DatasetError(f"{row.where}: {name}.{number}: must be a role and a text")
        if role == "assistant":
            break
        opening.append(Message(role=role, content=content))
    return tuple(opening)


def _is_written(content: str | None) -> bool:
    return content is not None


def _user(text: str) -> Message:
    return Message(role="user", content=text)


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
        cut = [] if prompt.cut is None else [prompt.cut.tokens]
        digest.update(json.dumps([prompt.index, prompt.category, turns, *cut]).encode() + b"\n")
    return digest.hexdigest()
