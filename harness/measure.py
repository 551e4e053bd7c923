"""Drives a decoder through one work item under the harness's clock.

The clock is read around each call of `start`, `admit` and `step` and nowhere else. While an item
is measured only these readings and the rounds are kept; every figure is derived from them after
the item has ended. A prefill is in nobody's decode time. Python's garbage collector runs before an
item and is off until the item has ended, so no collection falls into a step (`GARBAGE_COLLECTION`).

Knows no method, no model and no file.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from harness.decoder import Decoder, FinishReason, Request, Round, SpanKind
from harness.errors import HarnessError, RequestError
from harness.plan import WorkItem
from harness.records import ItemResult, RequestRow, RoundRow, SkippedRequest, SpanRow

GARBAGE_COLLECTION = (
    "objects from before the first item frozen; collected before each item, off during it"
)

Clock = Callable[[], int]


class ContractError(HarnessError):
    """A decoder broke the contract of `harness.decoder`: a bug of the decoder, always fatal."""


class _Interval(NamedTuple):
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class _Step(NamedTuple):
    time: _Interval
    rounds: list[Round]


class _Turn(NamedTuple):
    """One sequence's part in one step."""

    number: int
    step: _Step
    round: Round


def run_item(
    decoder: Decoder,
    item: WorkItem,
    requests: Sequence[Request],
    categories: Sequence[str] = (),
    clock: Clock = time.perf_counter_ns,
    max_rounds: int | None = None,
) -> ItemResult:
    """Decodes the requests of a work item, refilling slots as sequences finish.

    Args:
        decoder: warmed up, with room for the cell's batch size.
        item: what is measured; its prompt indices belong to `requests`, in order.
        requests: what to decode; the first `batch_size` start together.
        categories: of each request; empty where the dataset has none.
        clock: nanoseconds, monotonic.
        max_rounds: rounds after which a sequence is cut; None lets each finish.

    Raises:
        ContractError: the decoder returned something that its contract rules out.
        DraftProcessError: the draft worker died.
    """
    decoding = _Decoding(decoder, requests, item.cell.batch_size, clock, max_rounds)
    with _garbage_collector_off():
        decoding.start()
        while decoding.live:
            decoding.step()
            decoding.refill()
    return _result(item, requests, categories or [item.cell.dataset] * len(requests), decoding)


def warm_up(
    decoder: Decoder,
    requests: Sequence[Request],
    most_steps: int = 20,
    tolerance: float = 0.1,
    clock: Clock = time.perf_counter_ns,
) -> int:
    """Steps until three successive steps take the same time; nothing is kept.

    Args:
        decoder: in any state; nothing is live afterwards.
        requests: at most the decoder's batch size; started again when all have finished.
        most_steps: where to stop when the durations never agree.
        tolerance: the slowest of three steps may take this much longer than the fastest.
        clock: nanoseconds, monotonic.

    Returns:
        The number of steps made.
    """
    durations: list[int] = []
    decoding = _Decoding(decoder, requests, len(requests), clock)
    decoding.start()
    while decoding.live and len(durations) < most_steps and not _steady(durations, tolerance):
        decoding.step()
        durations.append(decoding.steps[-1].time.duration_ns)
        if not decoding.live:
            decoding = _Decoding(decoder, requests, len(requests), clock)
            decoding.start()
    decoding.stop()
    return len(durations)


def _steady(durations: Sequence[int], tolerance: float) -> bool:
    last = durations[-3:]
    return len(last) == 3 and max(last) <= (1 + tolerance) * min(last)


@contextmanager
def heap_frozen() -> Iterator[None]:
    """What exists now is left alone by the garbage collector, so that collecting is quick."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Decoding:
    """Continuous batching over one list of requests, and the log of what the clock said.

    Attributes:
        live: request id -> tokens that the sequence may still emit.
        prefills: request id -> the `start` or `admit` that took it.
        steps: every step made.
        refused: request id -> why the decoder refused it.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        batch_size: int,
        clock: Clock,
        max_rounds: int | None = None,
    ) -> None:
        self.live: dict[str, int] = {}
        self.prefills: dict[str, _Interval] = {}
        self.steps: list[_Step] = []
        self.refused: dict[str, str] = {}
        self._decoder = decoder
        self._waiting = deque(requests)
        self._batch_size = batch_size
        self._clock = clock
        self._max_rounds = max_rounds
        self._rounds: Counter[str] = Counter()

    def start(self) -> None:
        """Prefills the first requests together; one refused makes room for the next in line."""
        while self._waiting and not self.live:
            batch = list(islice(self._waiting, self._batch_size))
            begin = self._clock()
            try:
                self._decoder.start(batch)
            except RequestError as error:
                self.refused |= self._refusals(batch, error)
                self._waiting = deque(r for r in self._waiting if r.request_id not in self.refused)
                continue
            prefill = _Interval(begin, self._clock())
            for _ in batch:
                self._prefilled(self._waiting.popleft(), prefill)

    def step(self) -> None:
        """One timed step; finished or cut sequences give their slots back."""
        begin = self._clock()
        rounds = self._decoder.step()
        self.steps.append(_Step(_Interval(begin, self._clock()), rounds))
        _check_rounds(self._decoder.name, rounds, self.live)
        for done in rounds:
            self.live[done.request_id] -= len(done.tokens)
            self._rounds[done.request_id] += 1
            if done.finish is not None or self._rounds[done.request_id] == self._max_rounds:
                self._decoder.release(done.request_id)
                del self.live[done.request_id]

    def refill(self) -> None:
        """Admits waiting requests while slots are free."""
        while self._waiting and len(self.live) < self._batch_size:
            request = self._waiting.popleft()
            begin = self._clock()
            try:
                self._decoder.admit(request)
            except RequestError as error:
                self.refused[request.request_id] = str(error)
                continue
            self._prefilled(request, _Interval(begin, self._clock()))

    def stop(self) -> None:
        """Abandons what is live."""
        for request_id in self.live:
            self._decoder.release(request_id)
        self.live.clear()

    def _prefilled(self, request: Request, prefill: _Interval) -> None:
        self.prefills[request.request_id] = prefill
        self.live[request.request_id] = request.max_new_tokens

    def _refusals(self, batch: Sequence[Request], error: RequestError) -> dict[str, str]:
        """Which requests of a refused batch are at fault: each is tried alone."""
        reasons = {}
        for request in batch:
            try:
                self._decoder.start([request])
            except RequestError as reason:
                reasons[request.request_id] = str(reason)
        if not reasons:
            name = self._decoder.name
            raise ContractError(f"{name}: refused a batch but none of its requests: {error}")
        return reasons


def _check_rounds(decoder: str, rounds: Sequence[Round], live: Mapping[str, int]) -> None:
    """Raises `ContractError` unless every live sequence has exactly one well-formed round."""
    stepped = [done.request_id for done in rounds]
    for request_id in stepped:
        if request_id not in live:
            raise ContractError(f"{decoder}: stepped {request_id}, which is not live")
    if sorted(stepped) != sorted(live):
        raise ContractError(
            f"{decoder}: {len(live)} sequences are live, but a step returned rounds for {stepped}"
        )
    for done in rounds:
        fault = _fault(done, live[done.request_id])
        if fault:
            raise ContractError(f"{decoder}: round of {done.request_id} {fault}")


def _fault(done: Round, room: int) -> str | None:
    if not done.tokens and done.finish is None:
        return "emitted no token"
    if not 0 <= done.accepted <= done.drafted:
        return f"accepted {done.accepted} of {done.drafted} drafted tokens"
    if len(done.tokens) > room:
        return f"emitted {len(done.tokens)} tokens where max_new_tokens left room for {room}"
    if len(done.tokens) == room and done.finish is None:
        return "reached max_new_tokens but did not finish"
    return None


def _result(
    item: WorkItem, requests: Sequence[Request], categories: Sequence[str], decoding: _Decoding
) -> ItemResult:
    turns: dict[str, list[_Turn]] = {}
    for number, step in enumerate(decoding.steps):
        for done in step.rounds:
            turns.setdefault(done.request_id, []).append(_Turn(number, step, done))
    details = zip(requests, item.prompt_indices, categories, strict=True)
    origin = decoding.steps[0].time.start_ns if decoding.steps else 0
    return ItemResult(
        item=item,
        requests=tuple(
            _request_row(item, request, index, category, decoding.prefills[request.request_id], own)
            for request, index, category in details
            if (own := turns.get(request.request_id))
        ),
        rounds=tuple(
            _round_row(item, number, turn, origin)
            for own in turns.values()
            for number, turn in enumerate(own)
        ),
        skipped=tuple(
            SkippedRequest(request_id, item.cell.dataset, reason)
            for request_id, reason in decoding.refused.items()
        ),
    )


def _request_row(
    item: WorkItem,
    request: Request,
    prompt_index: int,
    category: str,
    prefill: _Interval,
    turns: Sequence[_Turn],
) -> RequestRow:
    output_ids = tuple(token for turn in turns for token in turn.round.tokens)
    durations = [turn.step.time.duration_ns for turn in turns]
    later = len(output_ids) - 1  # tokens after the first
    cell = item.cell
    return RequestRow(
        item=item.id,
        method=cell.method,
        dataset=cell.dataset,
        category=category,
        control=cell.control,
        temperature=cell.temperature,
        batch_size=cell.batch_size,
        repeat=item.repeat,
        block=item.block,
        request_id=request.request_id,
        prompt_index=prompt_index,
        prompt_tokens=len(request.prompt_ids),
        output_tokens=len(output_ids),
        output_ids=output_ids,
        finish=str(turns[-1].round.finish or FinishReason.ROUNDS),
        prefill_ns=prefill.duration_ns,
        ttft_ns=turns[0].step.time.end_ns - prefill.start_ns,
        decode_ns=sum(durations),
        tpot_ns=sum(durations[1:]) / later if later else None,
    )


def _round_row(item: WorkItem, number: int, turn: _Turn, origin: int) -> RoundRow:
    done, step = turn.round, turn.step
    total = dict.fromkeys(SpanKind, 0)
    for span in done.spans:
        total[span.kind] += span.end_ns - span.start_ns
    return RoundRow(
        item=item.id,
        request_id=done.request_id,
        step=turn.number,
        round=number,
        start_ns=step.time.start_ns - origin,
        end_ns=step.time.end_ns - origin,
        live=len(step.rounds),
        emitted=len(done.tokens),
        drafted=done.drafted,
        accepted=done.accepted,
        cache=done.cache,
        backup=done.backup,
        guesses=done.guesses,
        hit_chance=done.hit_chance,
        rank=done.rank,
        draft_ns=total[SpanKind.DRAFT],
        verify_ns=total[SpanKind.VERIFY],
        wait_ns=total[SpanKind.WAIT],
        transfer_ns=total[SpanKind.TRANSFER],
        speculate_ns=total[SpanKind.SPECULATE],
        spans=tuple(
            SpanRow(span.kind, span.start_ns - origin, span.end_ns - origin) for span in done.spans
        ),
    )
