"""The live decoders of a run, one for each method and batch size, all warm and open side by side.

They stay open together because cells take turns; models are shared through one `ModelProvider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.config import RunConfig
from harness.decoder import Decoder, DecoderOptions, DecoderSetup, ModelProvider
from harness.measure import warm_up
from harness.plan import Cell
from harness.workload import Workload


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method with its validated parameters."""

    decoder: type[Decoder]
    options: DecoderOptions


class _Key(NamedTuple):
    method: str
    batch_size: int


def _key(cell: Cell) -> _Key:
    return _Key(cell.method, cell.batch_size)


class DecoderPool:
    """Creates decoders when they are first needed, and anew after one has failed."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        models: ModelProvider,
        workload: Workload,
        config: RunConfig,
    ) -> None:
        self._methods = methods
        self._models = models
        self._workload = workload
        self._config = config
        self._decoders: dict[_Key, Decoder] = {}
        self._refused: dict[_Key, Exception] = {}  # could not be created; not tried again
        self._warm: set[tuple[_Key, float]] = set()

    def get(self, cell: Cell) -> Decoder:
        """The cell's decoder, warm at the cell's temperature. Raises whatever the method raises."""
        key = _key(cell)
        if key not in self._decoders:
            self._decoders[key] = self._create(cell)
        if (key, cell.temperature) not in self._warm:
            requests = self._workload.warm_up_requests(cell)
            warm_up(self._decoders[key], requests, self._config.warmup_steps)
            self._warm.add((key, cell.temperature))
        return self._decoders[key]

    def describe(self, cell: Cell) -> dict[str, Any]:
        """What the manifest keeps about a cell's decoder (docs/run-directory.md, `decoders`)."""
        method = self._methods[cell.method]
        alone = method.decoder.asynchronous and not self._config.placement.shared
        return {
            "options": method.options.model_dump(mode="json"),
            "tuned": bool(self._config.options.get(cell.method)),
            "devices": 2 if alone else 1,
            "diagnostics": dict(self._decoders[_key(cell)].diagnostics()),
        }

    def discard(self, cell: Cell) -> None:
        """Closes the decoder of a cell that has failed; other cells of the method get a new one."""
        key = _key(cell)
        self._warm = {warm for warm in self._warm if warm[0] != key}
        decoder = self._decoders.pop(key, None)
        if decoder is not None:
            with suppress(Exception):  # the failure that led here is the one to report
                decoder.close()

    def close(self) -> None:
        """Closes every decoder, the rest too when one raises."""
        with ExitStack() as stack:
            for decoder in self._decoders.values():
                stack.callback(decoder.close)
            self._decoders = {}

    def _create(self, cell: Cell) -> Decoder:
        key, method = _key(cell), self._methods[cell.method]
        if key in self._refused:
            raise self._refused[key]
        setup = DecoderSetup(
            models=self._models,
            options=method.options,
            placement=self._config.placement,
            batch_size=cell.batch_size,
            max_context=self._config.max_context,
            deterministic=self._config.deterministic,
        )
        try:
            return method.decoder.create(setup)
        except Exception as error:
            self._refused[key] = error
            raise
