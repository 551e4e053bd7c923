"""A model on several ranks, called like any other: the engine's decoders do not know of them.

This process is rank 0, the leader. Before it makes a pass it tells the other ranks to make the same
one; they meet in the sums of every layer, and the leader alone has the logits. Draws, acceptance
and everything else stay with the leader.

A rank that is lost ends the call, and with it the cell. All ranks but the leader are then started
anew, so that the next cell finds them; what caches held is lost.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from harness.errors import TargetRankError
from impl.engine.channel import PeerGoneError
from impl.engine.kv_cache import KVCache
from impl.engine.process_group import open_store
from impl.engine.tensor_parallel.messages import CacheState, Forward, Move, PrefillSlot
from impl.engine.tensor_parallel.rank_group import RankGroup
from impl.engine.tensor_parallel.rank_worker import RankProcess, RankWorker
from impl.engine.token_batch import TokenBatch

if TYPE_CHECKING:
    from impl.engine.models import ModelSpec

_BLAME_S = 2.0  # for a rank to end after the others have lost it


class LeaderCache(KVCache):
    """The leader's part of a cache; remembers what the other ranks have to do to theirs.

    Attributes:
        number: unique in its model.
        moves: gathers that the others have not been told.
        filled: by slot, which start of the ranks has its cells.
    """

    def __init__(self, part: KVCache, number: int, start: int) -> None:
        """Takes over the memory of `part`."""
        self.memory, self.lengths = part.memory, part.lengths
        self.number = number
        self.moves: list[Move] = []
        self.filled = [start] * len(part.lengths)

    def gather(self, slot: int, cells: Sequence[int]) -> None:
        """See `KVCache.gather`."""
        self.moves.append(Move(slot, self.lengths[slot], tuple(cells)))
        super().gather(slot, cells)


class TensorParallelModel:
    """See the module docstring and `impl.engine.language_model.LanguageModel`."""

    def __init__(self, spec: ModelSpec) -> None:
        """Starts a process for each rank but this one, and loads this one's part meanwhile.

        Args:
            spec: the model, with its ranks.

        Raises:
            ModelError: the model cannot be shared out so.
            TargetRankError: a rank could not start.
        """
        self._spec = spec
        self._group = RankGroup(0, spec.ranks, spec.device)
        self._others: list[RankProcess] = []
        self._starts = 0
        self._numbers = itertools.count()
        self._dropped: list[int] = []
        weakref.finalize(self, _close, self._others)
        self._launch()
        try:
            self._part = spec.load_part(self._group)
            self._meet()
        except BaseException:  # also Ctrl-C: leave no process behind
            self.close()
            raise
        self.head_ids, self.device = self._part.head_ids, self._part.device
        self.dtype = self._part.dtype

    @property
    def vocabulary(self) -> int:
        """See `LanguageModel`."""
        return self._part.vocabulary

    @property
    def max_position(self) -> int:
        """See `LanguageModel`."""
        return self._part.max_position

    @property
    def batch_invariant(self) -> bool:
        """See `LanguageModel`."""
        return self._part.batch_invariant

    @property
    def weight_bytes(self) -> int:
        """See `LanguageModel`; of all ranks together, padding of the head included."""
        return self._part.weight_bytes * self._group.size

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the ranks behind the leader."""
        return [process.pid for process in self._others]

    def new_cache(self, slots: int, cells: int) -> LeaderCache:
        """See `LanguageModel`; the other ranks allocate theirs with its first use."""
        cache = LeaderCache(self._part.new_cache(slots, cells), next(self._numbers), self._starts)
        weakref.finalize(cache, self._dropped.append, cache.number)
        return cache

    def forward(
        self, batch: TokenBatch, cache: KVCache, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """See `LanguageModel`. Raises `TargetRankError` when a rank died, failed or hangs."""
        ours = _as_leader(cache)
        if any(ours.filled[segment.slot] != self._starts for segment in batch.segments):
            raise TargetRankError("target ranks: the cache was lost with a rank; prefill it anew")
        with self._all_ranks(Forward.of(self._state(ours), batch, rows)):
            return self._part.forward(batch, cache, rows)

    def prefill(self, cache: KVCache, slot: int, tokens: Sequence[int]) -> None:
        """See `LanguageModel`. Raises `TargetRankError` when a rank died, failed or hangs."""
        ours = _as_leader(cache)
        with self._all_ranks(PrefillSlot(self._state(ours), slot, tuple(tokens))):
            self._part.prefill(cache, slot, tokens)
        ours.filled[slot] = self._starts

    def close(self) -> None:
        """Ends the other ranks. Safe to call twice."""
        self._group.disconnect()
        _close(self._others)

    def _state(self, cache: LeaderCache) -> CacheState:
        moves, dropped = tuple(cache.moves), tuple(self._dropped)
        cache.moves.clear()
        self._dropped.clear()
        slots, cells = len(cache.lengths), cache.cells
        return CacheState(cache.number, slots, cells, moves, dropped)

    @contextmanager
    def _all_ranks(self, call: Forward | PrefillSlot) -> Iterator[None]:
        """The other ranks make the call beside the block."""
        try:
            for process in self._others:
                process.send(call)
            yield
        except PeerGoneError as error:
            blamed = self._blame()
            self._restart()
            raise blamed from error
        except Exception:
            self._restart()  # the ranks may be out of step
            raise
        except BaseException:
            self.close()
            raise

    def _blame(self) -> TargetRankError:
        """Why a rank was lost. One that merely lost another ends with exit code 0."""
        deadline = time.monotonic() + _BLAME_S
        while time.monotonic() < deadline:
            for process in self._others:
                try:
                    if process.poll():
                        process.receive()
                except TargetRankError as error:
                    if process.exit_code != 0:
                        return error
            time.sleep(0.01)
        return TargetRankError("target ranks: one hangs; it has not come to a pass of the others")

    def _restart(self) -> None:
        self.close()
        self._launch()
        self._meet()

    def _launch(self) -> None:
        """Starts the other ranks, which load their parts."""
        self._starts += 1
        self._store = open_store()
        for rank, place in enumerate(self._spec.other_ranks, start=1):
            arguments = (replace(self._spec, device=place.device), rank, self._store.port)
            self._others.append(
                RankProcess(f"target rank {rank}", RankWorker, arguments, place.cores)
            )

    def _meet(self) -> None:
        for process in self._others:
            process.wait_until_ready()
        self._group.connect(self._store)


def _as_leader(cache: KVCache) -> LeaderCache:
    if not isinstance(cache, LeaderCache):
        raise TypeError("cache: must be one of this model's own")
    return cache


def _close(processes: list[RankProcess]) -> None:
    while processes:
        processes.pop().close()
