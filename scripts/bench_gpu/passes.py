"""What a pass takes beside what its weights take to be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from impl.engine.device import wait_for
from impl.engine.language_model import LanguageModel
from impl.engine.token_batch import TokenBatch

CONTEXT = 512  # tokens before the new ones
TOKENS = (1, 5, 8)  # decode, verify K + 1
PASSES = 50
BLOCKS = 3  # of passes; the quickest counts
_BUFFER_BYTES = 4 * 2**30


@dataclass(frozen=True)
class PassTime:
    """One shape of a pass.

    Attributes:
        model, tokens: what ran.
        queued_ms: a pass where the next is launched before it ends: the device's own time, if the
            host keeps up.
        waited_ms: launched, and waited for.
        floor_ms: reading the weights once at the measured bandwidth.
    """

    model: str
    tokens: int
    queued_ms: float
    waited_ms: float
    floor_ms: float

    @property
    def over_floor(self) -> float:
        """Waited-for time by the floor."""
        return self.waited_ms / self.floor_ms


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads: the better of adding up and copying a large buffer."""
    size = _BUFFER_BYTES if device.type == "cuda" else _BUFFER_BYTES // 128
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    added = seconds_of(lambda: source.sum(dtype=torch.int32), device, repeats=5)
    copied = seconds_of(lambda: target.copy_(source), device, repeats=5)
    return max(size / added, 2 * size / copied)


def time_passes(name: str, model: LanguageModel, bandwidth: float) -> list[PassTime]:
    """Of every shape, in turns of many passes."""
    floor_ms = 1e3 * model.weight_bytes / bandwidth
    cache = model.new_cache(1, 2 * CONTEXT)
    found = []
    for tokens in TOKENS:
        batch = TokenBatch.causal([(0, CONTEXT, range(tokens))])

        def run(batch: TokenBatch = batch) -> torch.Tensor:
            return model.forward(batch, cache)

        queued = seconds_of(run, model.device, repeats=PASSES)
        waited = min(_seconds_waited(run, model.device) for _ in range(PASSES))
        found.append(PassTime(name, tokens, 1e3 * queued, 1e3 * waited, floor_ms))
    return found


def seconds_of(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Seconds of one of `repeats` runs that are launched without waiting; the quickest block."""
    run()
    best = float("inf")
    for _ in range(BLOCKS):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait_for(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _seconds_waited(run: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start
