"""The contract between the harness and a decoding method. Imports nothing of ours.

A `Decoder` owns its models and advances a batch of sequences in rounds; the harness has the clock:

    decoder = DecoderClass.create(setup)
    decoder.start(requests)               # prefill; emits nothing
    while live sequences:
        rounds = decoder.step()           # one `Round` for each live sequence, >= 1 token each
        decoder.release(finished_id)      # frees the slot of a finished (or abandoned) sequence
        decoder.admit(next_request)       # prefills into a free slot while the others stay live
    decoder.close()                       # ends worker processes; safe to call twice

Methods are found by name through the entry-point group `harness.decoders`, so other packages can
add theirs without a fork.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

UNKNOWN_TOKEN = -1  # an emitted token whose id its server does not tell: counted, never judged


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Both p (target) and q (draft) are the distributions AFTER these.

    Attributes:
        temperature: 0 is greedy (argmax, lowest id on a tie).
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1.0 is off.
        seed: the run's seed; every draw is a function of (seed, request id, role, position).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        request_id: unique in its run; part of the key of its random streams.
        prompt_ids: token ids, chat template and BOS already applied; never empty.
        max_new_tokens: hard limit on emitted tokens, counting an end-of-sequence token.
        sampling: how to draw.
        eos_token_ids: generation ends with (and includes) the first of these.
        stop_sequences: generation ends with the first token at which the output ends in one of
            these token-id sequences (included in the output).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"  # max_new_tokens reached
    CONTEXT = "context"  # the KV cache has no room for another round
    ROUNDS = "rounds"  # cut by the harness, which was asked for so many rounds and no more


class CacheOutcome(StrEnum):
    """Whether the verification outcome was found in the speculation cache."""

    HIT = "hit"
    MISS = "miss"


class SpanKind(StrEnum):
    """What a stretch of a round was spent on. `SPECULATE` runs beside the others."""

    DRAFT = "draft"  # drafting on the critical path
    VERIFY = "verify"  # the target's forward pass and the accept/reject decision
    WAIT = "wait"  # the target idle while the draft process is busy
    TRANSFER = "transfer"  # messages or q's on their way, the target idle or sending
    SPECULATE = "speculate"  # the draft process at work while the target verifies


class Span(NamedTuple):
    """A stretch of time on `time.perf_counter_ns`, comparable between processes of one machine."""

    kind: SpanKind
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one step did for one sequence.

    Attributes:
        request_id: the sequence.
        tokens: emitted ids, already cut at EOS, stop sequence and max_new_tokens; at least one.
            Only a last round may have none, where a server tells of the end behind the last token.
        drafted: tokens proposed to the target in this round (0 for autoregressive decoding); every
            node of a tree counts.
        accepted: how many of them the target accepted, before any cut; at most `drafted`.
        spans: where the time went. Sequences advanced together share the same spans.
        finish: set on the sequence's last round.
        cache: hit or miss of the speculation that was verified in this round; None where there is
            no cache or no earlier outcome (a sequence's first round).
        backup: which fallback drafted after a miss ("neural", "fast"); None otherwise.
        guesses: outcomes ready in the speculation cache for this sequence; None without a cache.
        hit_chance: the method's own estimate of the chance that the outcome is among them.
        rank: 1-based place of the outcome's token among what the draft would have guessed, however
            many were; None where that is not known.
    """

    request_id: str
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    spans: tuple[Span, ...] = ()
    finish: FinishReason | None = None
    cache: CacheOutcome | None = None
    backup: str | None = None
    guesses: int | None = None
    hit_chance: float | None = None
    rank: int | None = None


Convention = Literal["equal-target", "pooled"]
ChannelName = Literal["shared", "distributed"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices each model owns. On a CPU a device is a set of cores, one thread each.

    Attributes:
        target_cores: cores of the target, shared out evenly among its devices; the process that
            calls `step` runs on those of the first.
        draft_cores: cores of the draft worker of asynchronous methods, shared out evenly among
            several. Synchronous methods draft on the target's devices.
        convention: what synchronous methods have. "equal-target": the target's cores, so that the
            target is the same for all. "pooled": the draft's cores too, for target and draft
            alike, so that all methods have the same machine.
        target_devices: "cuda:N" or "cpu", by their PyTorch names; several share each layer of the
            target (tensor parallelism), each with a process of its own.
        draft_device: of the draft worker, "cuda:N" or "cpu"; of several, separated by commas, for
            methods with a replica of the draft on each. Models on GPUs have their processes on the
            cores above.
        channel: between the target and the draft worker: "shared" memory, or "distributed", by
            messages alone, as between machines.
    """

    target_cores: tuple[int, ...] = (0,)
    draft_cores: tuple[int, ...] = (1,)
    convention: Convention = "equal-target"
    target_devices: tuple[str, ...] = ("cpu",)
    draft_device: str = "cpu"
    channel: ChannelName = "shared"

    @property
    def draft_devices(self) -> tuple[str, ...]:
        """The device of each draft worker."""
        return tuple(self.draft_device.split(","))

    @property
    def shared(self) -> bool:
        """True when a draft worker has no device of its own (flagged in reports)."""
        return self._drafts_apart < len(self.draft_devices)

    @property
    def _drafts_apart(self) -> int:
        """How many draft workers have a device of their own."""
        return sum(
            device not in self.target_devices
            or (device == "cpu" and not set(self.target_cores) & set(self.worker_cores(number)))
            for number, device in enumerate(self.draft_devices)
        )

    def rank_cores(self, rank: int) -> tuple[int, ...]:
        """The cores of the process that drives the target's device of this index."""
        each = len(self.target_cores) // len(self.target_devices)
        return self.target_cores[rank * each : (rank + 1) * each]

    def worker_cores(self, number: int) -> tuple[int, ...]:
        """The cores of the draft worker of this number."""
        each = len(self.draft_cores) // len(self.draft_devices)
        return self.draft_cores[number * each : (number + 1) * each]

    def with_one_draft(self) -> Placement:
        """The same with the first draft worker alone, for methods that have no more."""
        cores = self.worker_cores(0)
        return replace(self, draft_device=self.draft_devices[0], draft_cores=cores)

    def cores(self, asynchronous: bool) -> tuple[int, ...]:
        """The cores of the process that calls `step`, one thread each."""
        if asynchronous or self.convention == "equal-target":
            return self.rank_cores(0)
        return tuple(dict.fromkeys((*self.target_cores, *self.draft_cores)))

    def devices(self, asynchronous: bool) -> int:
        """How many devices a method owns: what its per-device figures are divided by."""
        both = asynchronous or self.convention == "pooled"
        return len(self.target_devices) + (self._drafts_apart if both else 0)


class ModelProvider(Protocol):
    """Gives a decoder its models; a process loads each once, whatever the number of decoders."""

    def target(self) -> Any:
        """The target, ready to run (in-house: `impl.engine.language_model.LanguageModel`)."""

    def draft(self) -> Any:
        """The draft model; raises `ModelError` when the pair has none."""

    @property
    def target_folder(self) -> Path:
        """The target's weights in Hugging Face layout (for peers that load them their own way)."""

    @property
    def draft_folder(self) -> Path | None:
        """The draft's weights in Hugging Face layout, or None when the pair has no draft."""


TuningGrid = Mapping[str, Sequence[Any]]


class DecoderOptions(BaseModel):
    """Base of each method's own parameters (`--set METHOD.KEY=VALUE`); unknown keys are errors.

    Class attributes:
        tuning_grid: option -> the values of it that `harness tune` tries. Candidates are all
            combinations, and the defaults. Empty for a method without anything to tune; options
            that do not decide its speed do not belong here. One whose value is "auto" is chosen by
            the method itself as it runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tuning_grid: ClassVar[TuningGrid] = {}

    @property
    def tunable(self) -> TuningGrid:
        """What of the grid there is to tune under these very options; all of it by default."""
        return self.tuning_grid

    @property
    def automatic(self) -> bool:
        """Whether the method chooses all of it itself."""
        return bool(self.tunable) and all(getattr(self, key) == "auto" for key in self.tunable)


@dataclass(frozen=True, slots=True)
class DecoderSetup:
    """Everything a decoder is built from.

    Attributes:
        models: source of the loaded target and draft.
        options: the method's own validated parameters, an instance of `Decoder.Options`.
        placement: devices and cores of target and draft.
        batch_size: most sequences live at once; the KV caches are sized by it.
        max_context: most tokens (prompt + output) of one sequence.
        deterministic: switch off choices that follow the clock (never changes the distribution).
    """

    models: ModelProvider
    options: DecoderOptions
    placement: Placement = field(default_factory=Placement)
    batch_size: int = 1
    max_context: int = 2048
    deterministic: bool = False


class Decoder(abc.ABC):
    """A decoding method. See the module docstring for the order of calls.

    Class attributes:
        name: the method's name on the command line.
        Options: its parameters, with defaults.
        needs_draft: whether the pair must have a draft model.
        asynchronous: whether it owns the draft's device beside the target's. Decides the number of
            devices that per-device figures divide by.
        replicates_draft: whether it has a draft on each of the draft's devices; else the first is
            the draft's only one.
        takes_synthetic: whether all that decides its tokens are the pair's two models, so that a
            coin can (docs/synthetic.md).
        own_kernels: whether its logits come from other kernels than those of the shared engine, so
            that they differ by rounding. The certificate allows for that.
    """

    name: ClassVar[str]
    Options: ClassVar[type[DecoderOptions]] = DecoderOptions
    needs_draft: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    replicates_draft: ClassVar[bool] = False
    takes_synthetic: ClassVar[bool] = False
    own_kernels: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def create(cls, setup: DecoderSetup) -> Decoder:
        """Loads models, starts workers. Raises `ModelError` or `DraftProcessError`."""

    @abc.abstractmethod
    def start(self, requests: Sequence[Request]) -> None:
        """Drops whatever was live and prefills `requests` (at most the setup's batch size).

        Returns when every model has finished its prefill, so that no prefill leaks into a step.

        Raises:
            RequestError: empty prompt, or no room for prompt and one token. Nothing is live then.
        """

    @abc.abstractmethod
    def admit(self, request: Request) -> None:
        """Prefills one request into a free slot. On `RequestError` the others are untouched."""

    @abc.abstractmethod
    def release(self, request_id: str) -> None:
        """Frees a sequence's slot. A finished sequence is not stepped even before this call."""

    @abc.abstractmethod
    def step(self) -> list[Round]:
        """Advances every live, unfinished sequence by one round. Raises `DraftProcessError`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends worker processes and frees shared memory. Safe to call more than once."""

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """What the method wants stored beside a cell (chosen lookahead, cache memory, ...)."""
        return {}
