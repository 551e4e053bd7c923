"""Prompts as token ids: chat template and BOS applied once, the same ids for every method."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import DatasetError, ModelError
from harness.prompts import Cut, Message, Prompt, PromptSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, chat template and BOS applied; empty ids for an empty prompt."""

    index: int
    category: str
    ids: tuple[int, ...]


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
    encoder = Encoder(tokenizer, template, system)
    return tuple(
        EncodedPrompt(
            prompt.index,
            prompt.category,
            encoder.ids(prompt, f"{prompt_set.name} prompt {prompt.index}"),
        )
        for prompt in prompt_set.prompts
    )


class Encoder:
    """A tokenizer with what is put around the user's words; see `encode_prompts`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: bool = True, system: str | None = None
    ) -> None:
        if template and not tokenizer.chat_template:
            raise ModelError("the tokenizer has no chat template: use --raw")
        self._tokenizer = tokenizer
        self._template = template
        self._system = system

    def ids(self, prompt: Prompt, where: str) -> tuple[int, ...]:
        """Token ids of a prompt, shortened where it has a length; empty for an empty prompt.

        Args:
            prompt: what to encode; every answer in it is written.
            where: names it in errors.
        """
        if not any(message.content for message in prompt.messages):
            return ()
        if prompt.cut is None:
            return self._whole(prompt.messages, where)
        return self._shortened(prompt.messages, prompt.cut, where)

    def _whole(self, messages: Sequence[Message], where: str) -> tuple[int, ...]:
        if self._template:
            ids = _template_ids(_conversation(messages, self._system), self._tokenizer, where)
        elif len(messages) == 1:
            ids = self._tokenizer(messages[0].content)["input_ids"]
        else:
            raise DatasetError(
                f"{where}: has several messages, which needs the chat template: no --raw"
            )
        bos = self._tokenizer.bos_token_id
        doubled = bos is not None and ids[:2] == [bos, bos]
        return tuple(ids[1:] if doubled else ids)

    def _shortened(self, messages: Sequence[Message], cut: Cut, where: str) -> tuple[int, ...]:
        """At most `cut.tokens` ids; a few fewer where tokens merge across the place of the cut."""
        *earlier, last = messages
        content = last.content or ""
        text = content[cut.start : cut.end]

        def encoded(characters: int) -> tuple[int, ...]:
            shorter = content[: cut.start] + text[:characters] + content[cut.end :]
            return self._whole([*earlier, Message(role=last.role, content=shorter)], where)

        split = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in split["offset_mapping"]]
        keep = cut.tokens - len(encoded(0))
        if keep < 1 or keep > len(ends):
            missing = (
                "its text is too short" if keep > len(ends) else "the template alone is longer"
            )
            raise DatasetError(f"{where}: cannot have {cut.tokens} tokens: {missing}")
        ids = encoded(ends[keep - 1])
        while len(ids) > cut.tokens and keep > 1:
            keep = max(1, keep - (len(ids) - cut.tokens))
            ids = encoded(ends[keep - 1])
        return ids


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


def _conversation(messages: Sequence[Message], system: str | None) -> list[dict[str, str]]:
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
