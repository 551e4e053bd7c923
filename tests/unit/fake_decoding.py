"""A clock that only moves when told to, and a decoder whose every round is written down."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from harness.decoder import Decoder, FinishReason, Request, Round
from harness.errors import RequestError
from harness.measure import run_item
from harness.metrics import CellData, split_cells
from harness.plan import Cell, WorkItem
from harness.records import ItemResult
from harness.store import RunData, RunStore, read_run

EOS = FinishReason.EOS
A, B, C = (f"mini/{i}/r0" for i in range(3))


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def advance(self, duration_ns: int) -> None:
        self.now += duration_ns


class ScriptedDecoder(Decoder):
    """Emits the scripted rounds; a prefill takes 100 ns a request, a step `step_ns`."""

    name = "scripted"

    def __init__(
        self,
        clock: FakeClock,
        script: Mapping[str, Sequence[Round]],
        step_ns: int | Callable[[int], int] = 10,  # or a function of the step's index
        refuses: Sequence[str] = (),
    ) -> None:
        self.clock = clock
        self.script = script
        self.step_ns = step_ns
        self.refuses = refuses
        self.left: dict[str, list[Round]] = {}
        self.steps = 0
        self.calls: list[str] = []

    @classmethod
    def create(cls, setup):
        raise NotImplementedError

    def start(self, requests):
        self.left = {}
        self.calls.append("start " + ",".join(r.request_id for r in requests))
        self._prefill(requests)

    def admit(self, request):
        self.calls.append(f"admit {request.request_id}")
        self._prefill([request])

    def release(self, request_id):
        self.calls.append(f"release {request_id}")
        del self.left[request_id]

    def step(self):
        self.clock.advance(self.step_ns(self.steps) if callable(self.step_ns) else self.step_ns)
        self.steps += 1
        return [rounds.pop(0) for rounds in self.left.values() if rounds]

    def close(self):
        pass

    def _prefill(self, requests):
        for request in requests:
            if request.request_id in self.refuses:
                raise RequestError(f"prompt of {request.request_id} is longer than the context")
        self.clock.advance(100 * len(requests))
        self.left |= {r.request_id: list(self.script[r.request_id]) for r in requests}


def emit(request_id: str, *tokens: int, finish: FinishReason | None = None, **fields: Any) -> Round:
    """A round; by default the last token is the bonus token and the others were drafted."""
    drafted = {"drafted": len(tokens) - 1, "accepted": len(tokens) - 1} | fields
    return Round(request_id, tokens, finish=finish, **drafted)


def request(request_id: str, max_new_tokens: int = 64) -> Request:
    return Request(request_id, (1, 2, 3), max_new_tokens)


def decode(
    cell: Cell,
    script: Mapping[str, Sequence[Round]],
    *,
    block: int = 0,
    repeat: int = 0,
    categories: Sequence[str] = (),
    **decoder: Any,
) -> ItemResult:
    """One work item; the script's keys are request ids `DATASET/INDEX/r{R}`."""
    clock = FakeClock()
    indices = tuple(int(request_id.split("/")[1]) for request_id in script)
    item = WorkItem(cell, repeat=repeat, block=block, prompt_indices=indices)
    scripted = ScriptedDecoder(clock, script, **decoder)
    with mock.patch.object(gc, "collect"):  # of this whole test process it takes 0.1 s
        return run_item(scripted, item, [request(name) for name in script], categories, clock)


def stored(directory: Path, *results: ItemResult, **manifest: Any) -> RunData:
    """The results as a finished run that was written and read back."""
    store = RunStore.create(directory, manifest)
    for result in results:
        store.append_item(result)
    store.finalise("finished")
    return read_run(directory)


def one_token_rounds(request_id: str, *tokens: int) -> list[Round]:
    """What autoregressive decoding does: a token a round, the last one ends the sequence."""
    *body, last = tokens
    return [*(emit(request_id, token) for token in body), emit(request_id, last, finish=EOS)]


def cells(directory: Path, *results: ItemResult) -> dict[Cell, CellData]:
    """The cells of a run with these items."""
    run = stored(directory / "run", *results)
    return {data.cell: data for data in split_cells(run.requests, run.rounds)}


def batch_of_two(cell: Cell) -> ItemResult:
    """9 tokens in 7 rounds, in 4 steps of 10 ns (see test_measure); TTFT 210, 210 and 110 ns."""
    script = {
        A: one_token_rounds(A, 1, 9),
        B: [emit(B, 1, 2), emit(B, 3, 4), emit(B, 9, finish=EOS)],
        C: one_token_rounds(C, 1, 9),
    }
    return decode(cell, script)
