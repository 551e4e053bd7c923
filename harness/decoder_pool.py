"""The live decoders of a run, one for each method and batch size, all warm and open side by side.

They stay open together because cells take turns; models are shared through one `ModelProvider`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.config import RunConfig
from harness.decoder import (
    Decoder,
    DecoderOptions,
    DecoderSetup,
    ModelProvider,
    Placement,
    TuningGrid,
)
from harness.measure import warm_up
from harness.plan import Cell
from harness.simulation.emulation import device_count
from harness.tuning.choices import Setting
from harness.workload import Workload


class TunedOptions(NamedTuple):
    """A method's parameters, and the names of those that come from tuning."""

    options: DecoderOptions
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method with its validated parameters.

    Attributes:
        decoder: the class.
        options: its parameters where nothing was tuned.
        given: names of those that the run gives itself.
        tuned: the parameters of the settings that were tuned.
    """

    decoder: type[Decoder]
    options: DecoderOptions
    given: frozenset[str] = frozenset()
    tuned: Mapping[Setting, TunedOptions] = field(default_factory=dict)

    @property
    def grid(self) -> TuningGrid:
        """What `harness tune` searches; empty where there is nothing to tune."""
        return self.options.tunable

    def options_for(self, cell: Cell) -> DecoderOptions:
        """The parameters that the method has in a cell."""
        found = self.tuned.get(Setting.of(cell))
        return self.options if found is None else found.options


class _Key(NamedTuple):
    method: str
    batch_size: int
    options: str  # as JSON


class DecoderPool:
    """Creates decoders when they are first needed, and anew after one has failed."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        models: ModelProvider,
        workload: Workload,
        config: RunConfig,
        place: Callable[[Sequence[int]], None],
    ) -> None:
        """Opens nothing yet.

        Args:
            methods: by name.
            models: shared by all decoders.
            workload: what to warm up on.
            config: the run.
            place: moves this process to some cores, with a thread for each.
        """
        self._methods = methods
        self._models = models
        self._workload = workload
        self._config = config
        self._place = place
        self._cores: tuple[int, ...] | None = None  # where this process is
        self._decoders: dict[_Key, Decoder] = {}
        self._refused: dict[_Key, Exception] = {}  # could not be created; not tried again
        self._warm: dict[tuple[_Key, float], int] = {}  # steps that it took

    @property
    def cores(self) -> tuple[int, ...]:
        """Those of the method that `get` gave last."""
        return self._cores or ()

    def get(self, cell: Cell) -> Decoder:
        """The cell's decoder, warm at the cell's temperature, this process on the method's cores.

        Raises whatever the method raises.
        """
        key = self._key(cell)
        self._move(self._methods[cell.method].decoder)
        if key not in self._decoders:
            self._decoders[key] = self._create(cell)
        if (key, cell.temperature) not in self._warm:
            requests = self._workload.warm_up_requests(cell)
            steps = warm_up(self._decoders[key], requests, self._config.warmup_steps)
            self._warm[key, cell.temperature] = steps
        return self._decoders[key]

    def describe(self, cell: Cell) -> dict[str, Any]:
        """What the manifest keeps about a cell's decoder (docs/run-directory.md, `decoders`)."""
        key, method = self._key(cell), self._methods[cell.method]
        found, options = method.tuned.get(Setting.of(cell)), method.options_for(cell)
        return {
            "options": options.model_dump(mode="json"),
            "tuned": bool(found or method.given & method.grid.keys()) if method.grid else None,
            "automatic": options.automatic,
            "tuned_options": list(found.names) if found else [],
            "devices": self._devices(method.decoder),
            "own_kernels": method.decoder.own_kernels,
            "warmup_steps": self._warm[key, cell.temperature],
            "diagnostics": dict(self._decoders[key].diagnostics()),
        }

    def _devices(self, decoder: type[Decoder]) -> int:
        where = self._placement(decoder)
        if self._config.devices:
            drafts = len(where.draft_devices) if decoder.asynchronous else 0
            return device_count(self._config.devices, drafts)
        return where.devices(decoder.asynchronous)

    def _placement(self, decoder: type[Decoder]) -> Placement:
        """The run's; a draft without replicas is on the first of the draft's devices."""
        where = self._config.placement
        alone = decoder.asynchronous and not decoder.replicates_draft
        return where.with_one_draft() if alone else where

    def discard(self, cell: Cell) -> None:
        """Closes the decoder of a cell that has failed; other cells of the method get a new one."""
        key = self._key(cell)
        self._warm = {warm: steps for warm, steps in self._warm.items() if warm[0] != key}
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

    def _key(self, cell: Cell) -> _Key:
        options = self._methods[cell.method].options_for(cell)
        return _Key(cell.method, cell.batch_size, options.model_dump_json())

    def _move(self, decoder: type[Decoder]) -> None:
        cores = self._config.placement.cores(decoder.asynchronous)
        if cores != self._cores:
            self._place(cores)
            self._cores = cores

    def _create(self, cell: Cell) -> Decoder:
        key, method = self._key(cell), self._methods[cell.method]
        if key in self._refused:
            raise self._refused[key]
        setup = DecoderSetup(
            models=self._models,
            options=method.options_for(cell),
            placement=self._placement(method.decoder),
            batch_size=cell.batch_size,
            max_context=self._config.max_context,
            deterministic=self._config.deterministic,
        )
        try:
            return method.decoder.create(setup)
        except Exception as error:
            self._refused[key] = error
            raise
