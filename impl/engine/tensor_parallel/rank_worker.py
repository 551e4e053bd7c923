"""The other ranks of a model: each has its part of the weights and makes the leader's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.errors import TargetRankError
from impl.engine.channel import Channel
from impl.engine.device_process import Close, DeviceProcess
from impl.engine.kv_cache import KVCache
from impl.engine.process_group import find_store
from impl.engine.tensor_parallel.messages import CacheState, Forward, PrefillSlot
from impl.engine.tensor_parallel.rank_group import RankGroup

if TYPE_CHECKING:
    from impl.engine.models import ModelSpec


class RankProcess(DeviceProcess):
    """The leader's handle on another rank."""

    error = TargetRankError


class RankWorker:
    """What runs in it."""

    def __init__(self, spec: ModelSpec, rank: int, port: int) -> None:
        """Loads the rank's part on the spec's device; the leader's store listens on `port`."""
        self._port = port
        self._group = RankGroup(rank, spec.ranks, spec.device)
        self._model = spec.load_part(self._group)
        self._caches: dict[int, KVCache] = {}

    def serve(self, channel: Channel) -> None:
        """Makes the leader's calls until told to close."""
        self._group.connect(find_store(self._port))
        while True:
            match channel.receive():
                case Forward() as call:
                    rows = call.rows
                    wanted = rows if isinstance(rows, slice) else torch.tensor(rows)
                    cache = self._cache(call.cache)
                    self._model.forward(call.batch(), cache, wanted)
                case PrefillSlot(state, slot, tokens):
                    self._model.prefill(self._cache(state), slot, tokens)
                case Close():
                    return

    def _cache(self, state: CacheState) -> KVCache:
        """The rank's part of the leader's cache, brought to the same state."""
        for number in state.dropped:
            self._caches.pop(number, None)
        if state.number not in self._caches:
            self._caches[state.number] = self._model.new_cache(state.slots, state.cells)
        cache = self._caches[state.number]
        for slot, start, cells in state.moves:
            cache.truncate(slot, start)
            cache.gather(slot, cells)
        return cache
