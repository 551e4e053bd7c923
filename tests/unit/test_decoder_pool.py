"""Decoders of a run: shared between cells, warmed once a temperature, replaced after a failure."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from harness.config import RunConfig
from harness.decoder import (
    Convention,
    Decoder,
    DecoderOptions,
    DecoderSetup,
    FinishReason,
    Placement,
    Request,
    Round,
    TuningGrid,
)
from harness.decoder_pool import DecoderPool, Method, TunedOptions
from harness.encoding import EncodedPrompt
from harness.errors import DraftProcessError
from harness.plan import Cell
from harness.tuning.choices import Setting
from harness.workload import make_workload

AR = Cell("ar", "mini", 0.0, 1)
HOT = Cell("ar", "mini", 1.0, 1)
PAIR_OF_TWO = Cell("ar", "mini", 0.0, 2)
CONTROL = Cell("ar", "mini", 0.0, 1, control=True)
PLACES: list[Sequence[int]] = []  # where the pool under test has moved the process


class OneToken(Decoder):
    """Finishes every request with one token; remembers every batch that it was started with."""

    name: ClassVar[str] = "ar"

    @classmethod
    def create(cls, setup: DecoderSetup) -> "OneToken":
        return cls(setup)

    def __init__(self, setup: DecoderSetup) -> None:
        self.setup = setup
        self.started: list[list[Request]] = []
        self.closed = 0

    def start(self, requests: Sequence[Request]) -> None:
        self.started.append(list(requests))

    def step(self) -> list[Round]:
        live = self.started[-1]
        return [Round(r.request_id, (0,), 0, 0, finish=FinishReason.LENGTH) for r in live]

    def admit(self, request: Request) -> None:
        raise NotImplementedError

    def release(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def pool(decoder: type[Decoder] = OneToken, **fields: Any) -> DecoderPool:
    config = RunConfig(
        pair="tiny", methods=("ar",), temperatures=(0, 1), batch_sizes=(1, 2), max_new_tokens=1,
        warmup_steps=2, **fields,
    )  # fmt: skip
    prompts = {"mini": tuple(EncodedPrompt(row, "chat", (row,)) for row in range(4))}
    methods = {"ar": Method(decoder, DecoderOptions())}
    models: Any = None
    workload = make_workload(config, prompts, frozenset())
    return DecoderPool(methods, models, workload, config, PLACES.append)


def test_cells_of_one_method_and_batch_size_share_a_decoder() -> None:
    decoders = pool(max_context=77, deterministic=True)
    assert decoders.get(AR) is decoders.get(CONTROL) is decoders.get(HOT)
    assert decoders.get(PAIR_OF_TWO) is not decoders.get(AR)
    setup = decoders.get(PAIR_OF_TWO).setup  # type: ignore[attr-defined]
    assert (setup.batch_size, setup.max_context, setup.deterministic) == (2, 77, True)


def test_a_decoder_is_warmed_on_a_full_batch_once_a_temperature() -> None:
    decoders = pool()
    decoder: Any = decoders.get(PAIR_OF_TWO)
    assert all(len(batch) == 2 for batch in decoder.started)
    warmed = len(decoder.started)
    decoders.get(PAIR_OF_TWO)
    assert len(decoder.started) == warmed
    assert decoders.describe(PAIR_OF_TWO)["warmup_steps"] == 2  # the bound
    decoders.get(Cell("ar", "mini", 1.0, 2))
    assert decoder.started[-1][0].sampling.temperature == 1
    assert len(decoder.started) > warmed


def test_after_a_failure_other_cells_get_a_new_decoder_that_is_warm() -> None:
    decoders = pool()
    failed: Any = decoders.get(AR)
    decoders.discard(AR)
    assert failed.closed == 1
    replacement: Any = decoders.get(CONTROL)
    assert replacement is not failed
    assert replacement.started


def test_a_decoder_that_cannot_be_created_is_tried_once() -> None:
    attempts = []

    class Unstartable(OneToken):
        @classmethod
        def create(cls, setup: DecoderSetup) -> "OneToken":
            attempts.append(setup)
            raise DraftProcessError("no second core")

    decoders = pool(Unstartable)
    for cell in (AR, HOT, CONTROL):
        with pytest.raises(DraftProcessError, match="no second core"):
            decoders.get(cell)
    assert len(attempts) == 1


def test_closing_closes_all_even_when_one_raises() -> None:
    class Stuck(OneToken):
        def close(self) -> None:
            super().close()
            raise DraftProcessError("did not end")

    decoders = pool(Stuck)
    opened: list[Any] = [decoders.get(AR), decoders.get(PAIR_OF_TWO)]
    with pytest.raises(DraftProcessError):
        decoders.close()
    assert [decoder.closed for decoder in opened] == [1, 1]
    decoders.close()  # nothing is left to close


class Waiting(OneToken):
    """Synchronous, with something to tune."""

    class Options(DecoderOptions):
        tuning_grid: ClassVar[TuningGrid] = {"size": (1, 2)}
        size: int = 1
        note: str = ""


class Beside(Waiting):
    asynchronous: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("convention", "cores", "devices"),
    [("equal-target", [(0,)], (1, 2)), ("pooled", [(0, 1), (0,), (0, 1)], (2, 2))],
)
def test_synchronous_methods_have_the_drafts_cores_too_where_they_are_pooled(
    convention: Convention, cores: list[tuple[int, ...]], devices: tuple[int, int]
) -> None:
    placement = Placement((0,), (1,), convention)
    config = RunConfig(pair="tiny", methods=("ar", "sd"), placement=placement, warmup_steps=1)
    prompts = {"mini": (EncodedPrompt(0, "chat", (0,)),)}
    methods = {"ar": Method(OneToken, DecoderOptions()), "sd": Method(Beside, Beside.Options())}
    models: Any = None
    moves: list[Sequence[int]] = []
    workload = make_workload(config, prompts, frozenset())
    decoders = DecoderPool(methods, models, workload, config, moves.append)
    other = Cell("sd", "mini", 0.0, 1)
    for cell in (AR, CONTROL, other, AR):
        decoders.get(cell)
    assert moves == cores
    assert (decoders.describe(AR)["devices"], decoders.describe(other)["devices"]) == devices


def test_shared_cores_are_one_device_by_either_convention() -> None:
    for convention in ("equal-target", "pooled"):
        placement = Placement((0, 1), (1,), convention)  # type: ignore[arg-type]
        assert [placement.devices(alone) for alone in (True, False)] == [1, 1]
        assert placement.cores(asynchronous=False) == (0, 1)


@pytest.mark.parametrize(
    ("target", "draft", "shared", "devices"),
    [
        ("cuda:0-3", "cuda:4", False, [5, 4]),
        ("cuda:0-3", "cuda:0", True, [4, 4]),
        ("cuda:0", "cpu", False, [2, 1]),  # the draft's cores are a device beside the GPU
        ("cuda:0", None, True, [1, 1]),
        ("cuda:0-3", "cuda:4-5", False, [6, 4]),
        ("cuda:0", "cuda:0-1", True, [2, 1]),
    ],
)
def test_per_device_figures_divide_by_the_gpus_in_use(target, draft, shared, devices) -> None:
    given = {"target_devices": target, **({"draft_device": draft} if draft else {})}
    placement = RunConfig(pair="tiny", placement=given).placement  # type: ignore[arg-type]
    assert placement.shared is shared
    assert [placement.devices(asynchronous) for asynchronous in (True, False)] == devices


def test_only_a_method_with_replicas_has_more_than_the_first_draft_device() -> None:
    class Alone(OneToken):
        asynchronous = True

    class Replicated(Alone):
        replicates_draft = True

    placement = Placement((0,), (1, 2), draft_device="cpu,cpu")
    names = {"sync": OneToken, "alone": Alone, "replicated": Replicated}
    methods = {name: Method(decoder, DecoderOptions()) for name, decoder in names.items()}
    config = RunConfig(pair="tiny", methods=tuple(names), placement=placement, warmup_steps=1)
    workload = make_workload(config, {"mini": (EncodedPrompt(0, "chat", (0,)),)}, frozenset())
    models: Any = None
    pool = DecoderPool(methods, models, workload, config, PLACES.append)
    found = {}
    for name in names:
        cell = Cell(name, "mini", 0.0, 1)
        decoder: Any = pool.get(cell)
        found[name] = (decoder.setup.placement.draft_cores, pool.describe(cell)["devices"])
    assert found == {"sync": ((1, 2), 1), "alone": ((1,), 2), "replicated": ((1, 2), 3)}


@pytest.mark.parametrize(
    ("given", "ranks", "draft"),
    [
        ({"target_devices": "cuda:0-3", "draft_device": "cuda:4"}, [(0,), (1,), (2,), (3,)], (4,)),
        ({"target_devices": "cpu,cpu", "draft_cores": [1]}, [(0,), (1,)], (1,)),
        (
            {"target_devices": ["cpu", "cpu"], "target_cores": [0, 2, 4, 6], "draft_cores": [1]},
            [(0, 2), (4, 6)],
            (1,),
        ),
    ],
)
def test_several_target_devices_have_a_process_each_on_cores_of_its_own(
    given, ranks, draft
) -> None:
    placement = RunConfig(pair="tiny", placement=given).placement
    found = [placement.rank_cores(rank) for rank in range(len(placement.target_devices))]
    assert found == ranks
    assert placement.draft_cores == draft
    assert placement.cores(asynchronous=True) == placement.cores(asynchronous=False) == ranks[0]


def test_each_setting_has_its_tuned_options_and_the_rest_the_runs_own() -> None:
    greedy = TunedOptions(Waiting.Options(size=2), ("size",))
    method = Method(
        Waiting, Waiting.Options(note="x"), frozenset({"note"}), {Setting(False, 1): greedy}
    )
    config = RunConfig(
        pair="tiny", methods=("ar",), temperatures=(0, 1), batch_sizes=(1, 2), warmup_steps=1
    )
    prompts = {"mini": tuple(EncodedPrompt(row, "chat", (row,)) for row in range(4))}
    models: Any = None
    workload = make_workload(config, prompts, frozenset())
    decoders = DecoderPool({"ar": method}, models, workload, config, PLACES.append)
    sizes = {}
    for cell in (AR, HOT, PAIR_OF_TWO, CONTROL):
        decoder: Any = decoders.get(cell)
        sizes[cell] = decoder.setup.options.size
    assert sizes == {AR: 2, CONTROL: 2, HOT: 1, PAIR_OF_TWO: 1}
    assert decoders.get(AR) is not decoders.get(HOT)
    assert decoders.describe(AR)["tuned_options"] == ["size"]
    assert decoders.describe(HOT)["tuned_options"] == []


@pytest.mark.parametrize(
    ("decoder", "given", "tuned"),
    [
        (OneToken, {}, None),
        (Waiting, {}, False),
        (Waiting, {"size": 2}, True),
        (Waiting, {"note": "x"}, False),  # is no part of the grid
    ],
)
def test_a_method_without_a_grid_has_nothing_to_tune(decoder: Any, given: Any, tuned: Any) -> None:
    method = Method(decoder, decoder.Options(**given), frozenset(given))
    config = RunConfig(pair="tiny", methods=("ar",), warmup_steps=1)
    models: Any = None
    workload = make_workload(config, {"mini": (EncodedPrompt(0, "chat", (0,)),)}, frozenset())
    decoders = DecoderPool({"ar": method}, models, workload, config, PLACES.append)
    decoders.get(AR)
    assert decoders.describe(AR)["tuned"] is tuned
