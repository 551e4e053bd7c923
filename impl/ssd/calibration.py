"""Measuring what passes cost, so that lookahead and budget can go by it from the start."""

from __future__ import annotations

import time
from collections.abc import Sequence

from impl.engine.channel import Channel
from impl.engine.device import wait_for
from impl.engine.draft_process import DraftProcess
from impl.engine.kv_cache import KVCache
from impl.engine.language_model import LanguageModel
from impl.engine.token_batch import TokenBatch
from impl.ssd.budgeting import Costs, PassTimes
from impl.ssd.messages import Exercise, Exercised, Rest

TOKENS = (1, 3, 5, 7, 9)  # of a target pass, for each sequence
ROWS = (1, 4, 8, 12, 16)  # of a draft pass, for each sequence
CONTEXT = 64  # cells attended to; their content does not matter
REPEATS = 3  # the quickest counts: the least disturbed by other programs


def measure_costs(
    target: LanguageModel, cache: KVCache, drafts: Sequence[DraftProcess], batch_size: int
) -> Costs:
    """Times the passes of target and draft, each alone and beside the other.

    Several drafts all work beside the target; the first alone drafts while it waits.
    """
    sizes = tuple(n * batch_size for n in TOKENS)
    rows = Exercise(tuple(n * batch_size for n in ROWS))
    idle = _time_passes(target, cache, sizes)
    for draft in drafts:
        draft.send(rows)
    loaded = _time_passes(target, cache, sizes)
    beside, *_ = [_rest(draft) for draft in drafts]
    drafts[0].send(rows)
    alone = _rest(drafts[0])
    return Costs(*(PassTimes.of(seconds) for seconds in (idle, loaded, alone, beside)))


def _rest(draft: DraftProcess) -> dict[int, float]:
    draft.send(Rest())
    exercised: Exercised = draft.receive()
    return exercised.seconds


def exercise(
    model: LanguageModel, cache: KVCache, sizes: Sequence[int], channel: Channel
) -> dict[int, float]:
    """Runs passes of these sizes in turns until `Rest` arrives; the quickest seconds of each.

    Each size is timed `REPEATS` times at least, then also while nothing else works.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    while not channel.poll() or len(seconds[sizes[-1]]) < REPEATS:
        for size in sizes:
            seconds[size].append(_time_pass(model, cache, size))
    message = channel.receive()
    if not isinstance(message, Rest):
        raise TypeError(f"expected Rest, got {message!r}")
    return {size: min(times) for size, times in seconds.items()}


def _time_passes(model: LanguageModel, cache: KVCache, sizes: Sequence[int]) -> dict[int, float]:
    """In turns, so that what disturbs the machine for a while hits no size every time."""
    rounds = [[_time_pass(model, cache, size) for size in sizes] for _ in range(REPEATS)]
    return dict(zip(sizes, map(min, zip(*rounds, strict=True)), strict=True))


def _time_pass(model: LanguageModel, cache: KVCache, tokens: int) -> float:
    """Seconds of a pass over `tokens` tokens in slot 0, whose cells nobody needs yet."""
    start = min(CONTEXT, cache.cells - tokens)
    batch = TokenBatch.causal([(0, start, [0] * tokens)])
    begin = time.perf_counter()
    model.forward(batch, cache)
    wait_for(model.device)
    return time.perf_counter() - begin
