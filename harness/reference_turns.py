"""Earlier answers of a conversation: the target writes them once a run, greedily, for all methods.

So every method continues the very same conversation, whatever it would have answered itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from harness.config import RunConfig
from harness.decoder import Decoder, DecoderSetup, ModelProvider, Request
from harness.encoding import Encoder
from harness.errors import RequestError
from harness.plan import BASELINE
from harness.prompts import Message, Prompt, PromptSet
from harness.registry import decoder_class, decoder_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = Callable[[Prompt], str]


def write_answers(prompts: PromptSet, answer: Answer) -> PromptSet:
    """The prompts with every open answer written; equal conversations get one answer.

    Args:
        prompts: those picked.
        answer: the text that follows a prompt whose last turn is the user's.
    """
    written: dict[tuple[Message, ...], str] = {}
    return replace(
        prompts, prompts=tuple(_written(prompt, answer, written) for prompt in prompts.prompts)
    )


class TargetAnswers:
    """What the target answers: greedy, autoregressive, at most `max_new_tokens` of the run.

    A context manager; the decoder is created for the first answer and closed at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        models: ModelProvider,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
        answered: Callable[[int], None],
    ) -> None:
        """Loads nothing yet; `answered` is told how many answers have been written."""
        self._config = config
        self._models = models
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, not config.raw, config.system)
        self._eos = eos_token_ids
        self._answered = answered
        self._answers = 0
        self._stack = ExitStack()
        self._decoder: Decoder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __call__(self, prompt: Prompt) -> str:
        """The answer to a prompt; empty where the prompt leaves no room for one in the context."""
        ids = self._encoder.ids(prompt, f"prompt {prompt.index}")
        request = Request(
            "reference", ids, self._config.max_new_tokens, eos_token_ids=self._eos
        )  # greedy
        try:
            emitted = _decode(self._opened(), request)
            self._answers += 1
            self._answered(self._answers)
        except RequestError:  # nor is there room for the prompts that this one begins
            return ""
        return str(self._tokenizer.decode(emitted, skip_special_tokens=True)).strip()

    def _opened(self) -> Decoder:
        if self._decoder is None:
            setup = DecoderSetup(
                models=self._models,
                options=decoder_options(BASELINE, {}),
                placement=self._config.placement,
                max_context=self._config.max_context,
            )
            self._decoder = decoder_class(BASELINE).create(setup)
            self._stack.callback(self._decoder.close)
        return self._decoder


def _decode(decoder: Decoder, request: Request) -> list[int]:
    decoder.start([request])
    tokens: list[int] = []
    while True:
        (done,) = decoder.step()
        tokens += done.tokens
        if done.finish is not None:
            decoder.release(request.request_id)
            return tokens


def _written(prompt: Prompt, answer: Answer, written: dict[tuple[Message, ...], str]) -> Prompt:
    messages: list[Message] = []
    for message in prompt.messages:
        so_far = tuple(messages)
        if message.content is None and so_far not in written:
            written[so_far] = answer(replace(prompt, messages=so_far, cut=None))
        content = written[so_far] if message.content is None else message.content
        messages.append(Message(role=message.role, content=content))
    return replace(prompt, messages=tuple(messages))
