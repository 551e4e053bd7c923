"""hf: transformers' own `generate`, plain or assisted by the draft, on the same weights and cores.

`generate` runs in a thread that hands over each round through a streamer and then waits for the
next `step`, so that nothing is computed between steps. Prompts are cached beforehand, all but the
last token, as the methods on our engine do it; `generate` continues from there.

The draft of assisted generation is the pair's in its plain dtype: neither quantised nor trimmed.
Tokens are drawn by transformers from torch's global generator, seeded by the requests: they depend
on the batch that a request is in. With scikit-learn installed transformers adapts the threshold.
"""

from __future__ import annotations

import hashlib
import inspect
import queue
import threading
import time
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from harness.decoder import (
    Decoder,
    DecoderOptions,
    DecoderSetup,
    Request,
    Round,
    Span,
    SpanKind,
    TuningGrid,
)
from harness.errors import ModelError, RequestError
from impl.engine.models import Models, ModelSpec
from impl.engine.sequence import Sequence, SequenceSlots

if TYPE_CHECKING:
    import torch


class TransformersOptions(DecoderOptions):
    """Parameters of transformers; the defaults are its own."""

    tuning_grid: ClassVar[TuningGrid] = {"lookahead": (2, 3, 4, 5, 6, 8, 20)}

    assisted: bool = Field(False, description="assisted generation by the pair's draft; batch 1")
    lookahead: int = Field(20, ge=1, le=64, description="num_assistant_tokens, at most")
    stop_below: float = Field(
        0.4, ge=0, le=1, description="assistant_confidence_threshold; 0 never stops early"
    )
    schedule: str = Field(
        "constant",
        pattern="^(constant|heuristic|heuristic_transient)$",
        description="num_assistant_tokens_schedule",
    )

    @property
    def tunable(self) -> TuningGrid:
        """See `DecoderOptions.tunable`: plain `generate` has nothing to tune."""
        return self.tuning_grid if self.assisted else {}

    @model_validator(mode="after")
    def _assistant_options_need_one(self) -> Self:
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if getattr(self, name) != field.default]
        if changed and not self.assisted:
            raise ValueError(f"{changed[0]}: is for assisted generation; set assisted=true too")
        return self


class TransformersDecoder(Decoder):
    """See the module docstring.

    A batch is what `generate` makes of it: static. Admitting a request caches all live sequences
    anew, padded to one length, and a finished sequence is computed along until then.
    """

    name = "hf"
    Options = TransformersOptions
    own_kernels = True

    def __init__(self, setup: DecoderSetup, options: TransformersOptions) -> None:
        self.setup, self.options = setup, options
        self.slots = SequenceSlots(setup.batch_size, setup.max_context)
        self.target, self.draft = _load_models(setup, options)
        self.rows: list[Sequence] = []  # of the running batch; finished and released ones too
        self.generation: _Generation | None = None
        self.watch = _Watch(self.target)
        self.cache_name = _cache_name(self.target)
        if self.draft is not None:
            _continue_from_cache(self.target, self.cache_name)

    @classmethod
    def create(cls, setup: DecoderSetup) -> TransformersDecoder:
        """See `Decoder.create`."""
        return cls(setup, TransformersOptions.model_validate(setup.options.model_dump()))

    def start(self, requests: List[Request]) -> None:
        """See `Decoder.start`."""
        self._stop()
        for sequence in self.slots.all():
            self.slots.close(sequence.request.request_id)
        try:
            for request in requests:
                self.slots.open(request)
            self._begin()
        except RequestError:
            for sequence in self.slots.all():
                self.slots.close(sequence.request.request_id)
            raise

    def admit(self, request: Request) -> None:
        """See `Decoder.admit`."""
        sequence = self.slots.open(request)
        try:
            self._begin()
        except RequestError:
            self.slots.close(sequence.request.request_id)
            raise

    def release(self, request_id: str) -> None:
        """See `Decoder.release`."""
        self.slots.close(request_id)
        if not self.slots.all():
            self._stop()

    def step(self) -> list[Round]:
        """One round of `generate`: a token for each sequence or, assisted, a verified draft."""
        if not self.slots.live() or self.generation is None:
            return []
        start_ns = time.perf_counter_ns()
        block = self.generation.next_block()
        spans, drafted = self.watch.read(start_ns)
        live = set(map(id, self.slots.live()))
        return [
            Round(
                request_id=sequence.request.request_id,
                tokens=sequence.append(tokens),
                drafted=drafted,
                accepted=min(len(tokens) - 1, drafted),
                spans=spans,
                finish=sequence.finish,
            )
            for sequence, tokens in zip(self.rows, block, strict=True)
            if id(sequence) in live
        ]

    def close(self) -> None:
        """See `Decoder.close`."""
        self._stop()

    def _stop(self) -> None:
        if self.generation is not None:
            self.generation.stop()
            self.generation = None
        self.rows = []

    def _begin(self) -> None:
        """Caches every live sequence and starts `generate` behind it, up to its first pass."""
        live = self.slots.live()
        self._check_same(live)
        self._stop()
        self.rows = live
        if live:
            self.generation = _Generation(self._arguments(live), self.target, _seed(live))

    def _check_same(self, live: List[Sequence]) -> None:
        """Raises `RequestError` where one call of `generate` cannot serve all requests."""
        for sequence in live:
            own, first = sequence.request, live[0].request
            if (own.sampling, own.eos_token_ids) != (first.sampling, first.eos_token_ids):
                raise RequestError(
                    f"request {own.request_id}: samples or ends differently from "
                    f"{first.request_id}; generate takes one setting for a batch"
                )

    def _arguments(self, live: List[Sequence]) -> dict[str, Any]:
        import torch

        ids, mask = _padded(live, self.target.device)
        longest = max(s.draft_limit(self.setup.max_context) + 1 for s in live)
        arguments = {
            "input_ids": ids,
            "attention_mask": mask,
            "generation_config": _generation_config(live[0].request, ids.shape[1] + longest),
        }
        with torch.inference_mode():
            if ids.shape[1] > 1:
                arguments[self.cache_name] = _prefill(self.target, ids, mask, self.cache_name)
            if self.draft is not None:
                arguments["assistant_model"] = self.draft
                if ids.shape[1] > 1:
                    cache = _prefill(self.draft, ids, mask, self.cache_name)
                    self.draft.warm_cache = (self.cache_name, cache)
        return arguments


@dataclass(slots=True)
class _Failed:
    error: BaseException


class _Stopped(Exception):
    """`generate` is no longer wanted."""


class _Generation:
    """One call of `generate` in a thread, in lock-step with whoever asks for blocks.

    It is the call's streamer, too: `put` hands over a block and waits until the next is wanted.
    """

    def __init__(self, arguments: dict[str, Any], model: Any, seed: int) -> None:
        import torch

        self._blocks: queue.SimpleQueue[list[list[int]] | _Failed | None] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(0)
        self._stopping = False
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(model, arguments, seed, threads), daemon=True
        )
        self._thread.start()
        self._receive()  # the prompt: everything before the first pass is done

    def next_block(self) -> list[list[int]]:
        """The next tokens of each row. Raises whatever `generate` raised."""
        self._wanted.release()
        return self._receive()

    def stop(self) -> None:
        """Ends the call and its thread."""
        self._stopping = True
        self._wanted.release()
        self._thread.join()

    def put(self, value: torch.Tensor) -> None:
        """The streamer's part: the prompt at first, then the tokens of each round."""
        self._blocks.put(value.reshape(len(value), -1).tolist())
        self._wanted.acquire()
        if self._stopping:
            raise _Stopped

    def end(self) -> None:
        """The streamer's part."""

    def _receive(self) -> list[list[int]]:
        block = self._blocks.get()
        if isinstance(block, _Failed):
            raise block.error
        if block is None:
            raise ModelError("hf: generate ended before its sequences did")
        return block

    def _run(self, model: Any, arguments: dict[str, Any], seed: int, threads: int) -> None:
        import torch

        try:
            torch.set_num_threads(threads)  # as the harness set them; a new thread may not know
            torch.manual_seed(seed)
            model.generate(**arguments, streamer=self)
            self._blocks.put(None)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the block is awaited
            self._blocks.put(_Failed(error))


class _Watch:
    """When the target's passes begin and how many tokens they take, by a hook on the model."""

    def __init__(self, target: Any) -> None:
        self._began_ns = self._fed = 0
        target.register_forward_pre_hook(self._began, with_kwargs=True)

    def read(self, start_ns: int) -> tuple[tuple[Span, ...], int]:
        """The spans of the round that began at `start_ns`, and how many tokens it drafted."""
        end_ns = time.perf_counter_ns()
        verifying = Span(SpanKind.VERIFY, self._began_ns, end_ns)
        if self._fed == 1:
            return (verifying._replace(start_ns=start_ns),), 0
        return (Span(SpanKind.DRAFT, start_ns, self._began_ns), verifying), self._fed - 1

    def _began(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._began_ns, self._fed = time.perf_counter_ns(), kwargs["input_ids"].shape[1]


def _load_models(setup: DecoderSetup, options: TransformersOptions) -> tuple[Any, Any]:
    """Target and, for assisted generation, draft. Raises `ModelError`."""
    models = setup.models
    if not isinstance(models, Models):
        raise ModelError("models: hf loads weights by itself and needs impl.engine.Models")
    if not options.assisted:
        return _load(models.target_spec, models.target_spec.device), None
    if setup.batch_size > 1:
        raise ModelError("hf: assisted generation decodes one sequence; use --batch-sizes 1")
    specs = (models.target_spec, models.draft_spec)
    target, draft = (_load(spec, models.target_spec.device) for spec in specs)
    if target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"hf: assisted generation needs one vocabulary, these have {target.config.vocab_size} "
            f"and {draft.config.vocab_size} tokens; choose another pair"
        )
    _start_warm(draft)
    config = draft.generation_config
    config.num_assistant_tokens = options.lookahead
    config.num_assistant_tokens_schedule = options.schedule
    config.assistant_confidence_threshold = options.stop_below
    return target, draft


def _load(spec: ModelSpec, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, spec.dtype)
    model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=dtype).eval().to(device)
    model.generation_config = GenerationConfig()  # not the publisher's penalties and truncation
    return model


def _cache_name(model: Any) -> str:
    """What this version of transformers calls the KV cache of a model."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache_name: str) -> Any:
    """The KV cache of all columns but the last, the pending tokens.

    Args:
        model: whose cache.
        ids: int64 [rows, tokens], padded on the left.
        mask: int64 [rows, tokens], 0 at padding.
        cache_name: see `_cache_name`.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=positions[:, :-1],
        use_cache=True,
        logits_to_keep=1,
    )
    return getattr(output, cache_name)


def _padded(live: List[Sequence], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [rows, longest], padded on the left as `generate` wants it."""
    import torch

    longest = max(len(sequence.tokens) for sequence in live)
    ids = torch.zeros(len(live), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(live):
        ids[row, longest - len(sequence.tokens) :] = torch.tensor(sequence.tokens)
        mask[row, longest - len(sequence.tokens) :] = 1
    return ids.to(device), mask.to(device)


def _generation_config(request: Request, max_length: int) -> Any:
    from transformers import GenerationConfig

    sampling, ends = request.sampling, sorted(request.eos_token_ids)
    config = {"max_length": max_length, "eos_token_id": ends or None, "pad_token_id": 0}
    if sampling.temperature == 0:
        return GenerationConfig(do_sample=False, **config)
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,  # 0 is off; left out it would be 50
        top_p=sampling.top_p,
        **config,
    )


def _seed(live: List[Sequence]) -> int:
    """Of torch's generator: a function of the run's seed, the requests and how far they are."""
    parts = [f"{s.request.sampling.seed}:{s.request.request_id}:{s.output_length}" for s in live]
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _continue_from_cache(target: Any, cache_name: str) -> None:
    """Assisted generation feeds a prompt whole even where it is cached: feed what is new."""
    honest = target.prepare_inputs_for_generation

    def prepare(ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
        cache = kwargs.get(cache_name)
        if next_sequence_length is None and cache is not None:
            next_sequence_length = ids.shape[1] - cache.get_seq_length()
        return honest(ids, next_sequence_length=next_sequence_length, **kwargs)

    target.prepare_inputs_for_generation = prepare


def _start_warm(draft: Any) -> None:
    """The assistant's first call continues from `draft.warm_cache`, as the target's does."""
    honest = draft.generate
    draft.warm_cache = None

    def generate(*args: Any, **kwargs: Any) -> Any:
        warm, draft.warm_cache = draft.warm_cache, None
        if warm is not None:
            kwargs.setdefault(*warm)
        return honest(*args, **kwargs)

    draft.generate = generate
