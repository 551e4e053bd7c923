"""Models whose logits are a known function of the tokens they see, and SSD without a process.

`FixedLogits` has the surface of `Transformer` and a real KV cache, whose cells hold the token and
position that were fed instead of keys and values. Each new token sees exactly the cells that its
mask shows; they must be positions 0, 1, 2, ... once each, and their tokens are what the rule turns
into logits. So a stale cell, a wrong branch or a wrong position cannot go unnoticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from baselines.amusd import AmusdDecoder
from baselines.ar import AutoregressiveDecoder
from baselines.ngram import NgramDecoder, NgramOptions
from baselines.pearl import PearlDecoder
from baselines.sd import SpeculativeDecoder, SpeculativeOptions
from baselines.tree import TreeDecoder, TreeOptions
from harness.decoder import ChannelName, Decoder, DecoderSetup, Placement, Request, Round
from impl.engine import asynchronous_decoder
from impl.engine.kv_cache import KVCache
from impl.engine.models import Models
from impl.engine.token_batch import Segment, TokenBatch
from impl.ssd import decoder as ssd
from impl.ssd.options import SaguaroOptions


class Rule(Protocol):
    """Logits [V] of the token behind `tokens`. Frozen and hashable: it travels to processes."""

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]: ...


@dataclass(frozen=True)
class Counting:
    """The next token is the last one plus `step`, modulo `vocab`; then the one after it, ..."""

    vocab: int
    step: int = 1

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        best = tokens[-1] + self.step
        return [float(-((token - best) % self.vocab)) for token in range(self.vocab)]


@dataclass(frozen=True)
class Scripted:
    """The favourites at each position of the text, best first; a text ends with its script."""

    vocab: int
    favourites: tuple[tuple[int, ...], ...]

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        logits = [-100.0 - token for token in range(self.vocab)]
        for rank, token in enumerate(self.favourites[len(tokens)]):
            logits[token] = -float(rank)
        return logits


@dataclass(frozen=True)
class Hashed:
    """Random logits that depend on every token before; two seeds share `common` of their scale."""

    vocab: int
    seed: int
    common: float = 0.8

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        shared, own = (_noise(seed, self.vocab, tuple(tokens)) for seed in (0, self.seed))
        return list(2 * (self.common * shared + (1 - self.common) * own))


@cache
def _noise(seed: int, vocab: int, tokens: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([seed, *tokens]).normal(size=vocab)


@dataclass(frozen=True)
class Markov:
    """Next-token probabilities by the last token: row t of the table follows token t."""

    table: tuple[tuple[float, ...], ...]

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        with np.errstate(divide="ignore"):  # log 0 = -inf: never drawn
            return list(np.log(self.table[tokens[-1]]))


@dataclass(frozen=True)
class NotFinite:
    """Another rule, until a text is `length` tokens long: then NaN."""

    rule: Rule
    length: int

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        logits = self.rule(tokens)
        return logits if len(tokens) < self.length else [float("nan")] * len(logits)


@dataclass(frozen=True)
class Failing:
    """Another rule, until a text is `length` tokens long: then an exception."""

    rule: Rule
    length: int

    def __call__(self, tokens: Sequence[int]) -> Sequence[float]:
        if len(tokens) >= self.length:
            raise ValueError(f"a text of {len(tokens)} tokens")
        return self.rule(tokens)


class FixedLogits:
    """Stands in for `Transformer`; see the module docstring."""

    def __init__(self, rule: Rule, vocab: int, head_ids: torch.Tensor | None) -> None:
        self.rule = rule
        self.head_ids = head_ids
        self.config = SimpleNamespace(max_position=100_000, vocab_size=vocab)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    batch_invariant, weight_bytes = True, 0

    @property
    def max_position(self) -> int:
        return self.config.max_position

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size if self.head_ids is None else len(self.head_ids)

    def new_cache(self, slots: int, cells: int) -> KVCache:
        kv = KVCache(
            layers=1,
            slots=slots,
            kv_heads=1,
            cells=cells,
            head_dim=2,
            dtype=torch.int64,
            device=self.device,
        )
        kv.memory.fill_(-1)  # what was never written must never be read
        return kv

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        cache.truncate(slot, 0)
        self._write(TokenBatch.causal([(slot, 0, tokens)]), cache)
        cache.truncate(slot, len(tokens))

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        self._write(batch, cache)
        texts = [text for segment in batch.segments for text in self._texts(cache, segment)]
        logits = [self._logits(text) for text in texts]
        return (torch.stack(logits) if logits else torch.empty(0, self.vocabulary))[rows]

    def _write(self, batch: TokenBatch, cache: KVCache) -> None:
        fed = torch.stack([batch.tokens, batch.positions], dim=-1)
        first = 0
        for segment in batch.segments:
            cells = slice(segment.start, segment.end)
            cache.memory[0, 0, segment.slot, 0, cells] = fed[first : first + segment.count]
            first += segment.count
        assert first == len(batch.tokens)

    def _texts(self, cache: KVCache, segment: Segment) -> Iterator[tuple[int, ...]]:
        """The text that each new token ends, read from the cells that it sees."""
        mask = segment.tail_mask
        if mask is None:
            mask = torch.ones(segment.count, segment.count, dtype=torch.bool).tril()
        cells = cache.memory[0, 0, segment.slot, 0, : segment.end].tolist()
        tail = segment.end - mask.shape[1]
        for row, seen in enumerate(mask.tolist()):
            visible = cells[:tail] + [
                cell for cell, yes in zip(cells[tail:], seen, strict=True) if yes
            ]
            assert [position for _, position in visible] == list(range(len(visible)))
            assert visible[-1] == cells[segment.start + row]  # nothing sees what comes after it
            yield tuple(token for token, _ in visible)

    def _logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in self._known:
            self._known[tokens] = torch.tensor(self.rule(tokens), dtype=torch.float32)
        logits = self._known[tokens]
        return logits if self.head_ids is None else logits[self.head_ids]


@dataclass(frozen=True)
class FixedLogitSpec:
    """Stands in for `ModelSpec`. `head` is the trimmed vocabulary; () keeps every token."""

    rule: Rule
    vocab: int
    head: tuple[int, ...] = ()
    device: str = "cpu"

    folder = Path("no-such-folder")

    def load(self) -> FixedLogits:
        return FixedLogits(self.rule, self.vocab, self.head_ids())

    def width(self) -> int:
        return len(self.head) or self.vocab

    def head_ids(self) -> torch.Tensor | None:
        return torch.tensor(self.head) if self.head else None


class _NothingToDo(BaseException):
    """The worker would wait for a message now."""


class LocalDraft:
    """Stands in for `DraftProcess` and its channel: the worker runs inside `receive`.

    `serve` is entered anew at each `receive` and left where it would wait; a worker keeps its state
    in itself. So what follows the clock elsewhere is exact here: after each answer the worker makes
    `passes` passes before the next message is there, or as many as it wants (None).
    """

    passes: int | None = None
    start_s = 0.0

    def __init__(self, factory: Any, arguments: Sequence[Any], *_: Any) -> None:
        self.worker = factory(*arguments)
        self.unread: deque[Any] = deque()  # by the worker
        self.answers: deque[Any] = deque()
        self._left = self.passes

    def send(self, message: object) -> None:
        self.unread.append(message)

    def poll(self) -> bool:
        self.work()
        return bool(self.answers)

    def receive(self) -> Any:
        self.work()
        while not self.answers:
            self.work(passes=1)  # while the decoder waits, its draft works
        return self.answers.popleft()

    def remote_rows(self, shape: Sequence[int]) -> None:
        """The worker writes into the decoder's own buffer."""

    def close(self) -> None:
        self.unread.clear()

    def work(self, passes: int = 0) -> None:
        """Lets the worker read its messages and make what is left of its passes, and some more."""
        with suppress(_NothingToDo):
            self.worker.serve(_WorkerEnd(self))
        if passes and self._left is not None:
            self._left += passes
            self.work()

    def message_waits(self) -> bool:
        if self.unread or self._left == 0:
            return True
        if self._left is not None:
            self._left -= 1
        return False

    def next_message(self) -> Any:
        if not self.unread:
            raise _NothingToDo
        self._left = self.passes
        return self.unread.popleft()


class _WorkerEnd:
    """The worker's end of the channel."""

    def __init__(self, draft: LocalDraft) -> None:
        self.poll, self.receive = draft.message_waits, draft.next_message
        self.send = draft.answers.append

    def offer(self, rows: torch.Tensor) -> None:
        """The decoder has them."""


@contextmanager
def local_draft(passes: int | None) -> Iterator[None]:
    """Decoders that are created have their worker in this process."""
    local = type("LocalDraft", (LocalDraft,), {"passes": passes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asynchronous_decoder, "DraftProcess", local)
        yield


def work_beside_the_target(decoder: Any, passes: int) -> None:
    """The draft makes this many passes, if it wants to, while the target makes one."""
    score, process = decoder.verifier.score, decoder.draft.process

    def score_beside_the_draft(*arguments: Any) -> Any:
        scored = score(*arguments)
        process.work(passes)
        return scored

    decoder.verifier.score = score_beside_the_draft


def _let_replicas_proceed(decoder: Any) -> None:
    """The last message of a round is not answered: each replica reads it before the target does."""
    verify = decoder.verifier.verify

    def verify_beside_the_drafts(*arguments: Any) -> Any:
        for process in decoder.processes:
            process.work()
        return verify(*arguments)

    decoder.verifier.verify = verify_beside_the_drafts


@dataclass(frozen=True)
class Pair:
    """Two models and what to decode with."""

    models: Models
    batch_size: int = 1
    max_context: int = 64
    deterministic: bool = False
    channel: ChannelName = "shared"
    drafts: int = 1

    @classmethod
    def of(cls, target: Rule, draft: Rule, vocab: int, **settings: Any) -> Pair:
        return cls(Models(FixedLogitSpec(target, vocab), FixedLogitSpec(draft, vocab)), **settings)  # type: ignore[arg-type]

    @property
    def placement(self) -> Placement:
        """Several drafts share the target's core, so that two run on two cores."""
        if self.drafts == 1:
            return Placement(channel=self.channel)
        devices, cores = ",".join(["cpu"] * self.drafts), tuple(range(self.drafts))
        return Placement(draft_cores=cores, draft_device=devices, channel=self.channel)

    def setup(self, options: Any) -> DecoderSetup:
        return DecoderSetup(
            self.models,
            options,
            self.placement,
            batch_size=self.batch_size,
            max_context=self.max_context,
            deterministic=self.deterministic,
        )

    def ar(self) -> AutoregressiveDecoder:
        return AutoregressiveDecoder.create(self.setup(AutoregressiveDecoder.Options()))

    def sd(self, lookahead: int = 4, **options: Any) -> SpeculativeDecoder:
        options = {"lookahead": lookahead, **options}
        return SpeculativeDecoder.create(self.setup(SpeculativeOptions(**options)))

    def ngram(self, lookahead: int = 4, **options: Any) -> NgramDecoder:
        options = {"lookahead": lookahead, **options}
        return NgramDecoder.create(self.setup(NgramOptions(**options)))

    def tree(self, **options: Any) -> TreeDecoder:
        return TreeDecoder.create(self.setup(TreeOptions(**options)))

    @contextmanager
    def open(self, method: str, lookahead: int) -> Iterator[Decoder]:
        """A method by name: a tree of two branches; a draft process works in this one."""
        if method == "ssd":
            with self.ssd(lookahead=lookahead) as decoder:
                yield decoder
        elif method == "amusd":
            with self.amusd(max_verified=lookahead, beside=lookahead) as decoder:
                yield decoder
        elif method == "pearl":
            with self.pearl(lookahead=lookahead, beside=lookahead) as decoder:
                yield decoder
        elif method == "tree":
            yield self.tree(nodes=2 * lookahead, depth=lookahead, branching=2)
        else:
            yield self.ar() if method == "ar" else getattr(self, method)(lookahead)

    @contextmanager
    def ssd(self, *, passes: int | None = None, **options: Any) -> Iterator[ssd.SaguaroDecoder]:
        """SSD with its worker in this process, given `passes` passes between two messages."""
        with local_draft(passes):
            decoder = ssd.SaguaroDecoder.create(self.setup(SaguaroOptions(**PLAIN | options)))
        if self.drafts > 1:
            _let_replicas_proceed(decoder)
        try:
            yield decoder
        finally:
            decoder.close()

    @contextmanager
    def amusd(self, *, beside: int = 0, **options: Any) -> Iterator[AmusdDecoder]:
        """AMUSD in this process: `beside` draft passes while the target makes one."""
        with self._chains(AmusdDecoder, beside, options) as decoder:
            yield decoder

    @contextmanager
    def pearl(self, *, beside: int = 0, **options: Any) -> Iterator[PearlDecoder]:
        """PEARL in this process: `beside` draft passes while the target makes one."""
        with self._chains(PearlDecoder, beside, options) as decoder:
            yield decoder

    @contextmanager
    def _chains(self, method: Any, beside: int, options: dict[str, Any]) -> Iterator[Any]:
        with local_draft(passes=0):
            decoder = method.create(self.setup(method.Options(**options)))
        work_beside_the_target(decoder, beside)
        try:
            yield decoder
        finally:
            decoder.close()


# Nothing that follows the clock or the run's history, so that rounds can be worked out by hand.
PLAIN = {
    "lookahead": 4,
    "budget": 8,
    "build": "all",
    "fan_out": "geometric",
    "fallback": "neural",
    "return_short": False,
}

Log = dict[str, list[Round]]


def decode(decoder: Decoder, requests: Sequence[Request]) -> Log:
    """Decodes all requests; as soon as one ends, the next takes its slot beside the live ones."""
    size: int = decoder.setup.batch_size  # type: ignore[attr-defined]
    waiting = deque(requests[size:])
    log: Log = {request.request_id: [] for request in requests}
    live = [request.request_id for request in requests[:size]]
    decoder.start(requests[:size])
    while live:
        rounds = decoder.step()
        assert [r.request_id for r in rounds if r.request_id not in live] == []
        assert len(rounds) == len(live)
        for round_ in rounds:
            log[round_.request_id].append(round_)
        for name in [name for name in live if log[name][-1].finish]:
            live.remove(name)
            decoder.release(name)
            if waiting:
                decoder.admit(waiting[0])
                live.append(waiting.popleft().request_id)
    return log


def emitted(log: Log) -> dict[str, tuple[int, ...]]:
    """The output of each request."""
    return {
        name: tuple(token for round_ in rounds for token in round_.tokens)
        for name, rounds in log.items()
    }


def greedy_text(rule: Rule, request: Request, max_context: int = 64) -> tuple[int, ...]:
    """What greedy decoding must emit: the rule followed token by token."""
    tokens, output = list(request.prompt_ids), []
    while len(tokens) < max_context and len(output) < request.max_new_tokens:
        output.append(int(np.argmax(np.float32(rule(tokens)))))
        tokens.append(output[-1])
        if output[-1] in request.eos_token_ids:
            break
    return tuple(output)
