"""Decoders of a run: shared between cells, warmed once a temperature, replaced after a failure."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from harness.config import RunConfig
from harness.decoder import Decoder, DecoderOptions, DecoderSetup, FinishReason, Request, Round
from harness.decoder_pool import DecoderPool, Method
from harness.encoding import EncodedPrompt
from harness.errors import DraftProcessError
from harness.plan import Cell
from harness.workload import make_workload

AR = Cell("ar", "mini", 0.0, 1)
HOT = Cell("ar", "mini", 1.0, 1)
PAIR_OF_TWO = Cell("ar", "mini", 0.0, 2)
CONTROL = Cell("ar", "mini", 0.0, 1, control=True)


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
    return DecoderPool(methods, models, make_workload(config, prompts, frozenset()), config)


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
