"""What the methods share that draft in a process of their own, beside the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from pydantic import Field

from harness.decoder import DecoderOptions, DecoderSetup
from harness.errors import DraftProcessError
from impl.engine.channel import share
from impl.engine.device_process import WorkerFactory
from impl.engine.draft_client import DraftClient
from impl.engine.draft_process import DraftProcess
from impl.engine.engine_decoder import EngineDecoder
from impl.engine.models import draft_spec_of
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence

if TYPE_CHECKING:
    from impl.engine.distributed_channel import RemoteRows

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsynchronousOptions(DecoderOptions):
    """Parameters that every method with a draft process has."""

    on_draft_failure: Literal["abort", "degrade"] = Field(
        "abort", description="a dead or hung draft ends the cell, or leaves the target alone as AR"
    )


class AsynchronousDecoder(EngineDecoder):
    """Base of the methods whose draft owns a device.

    A method's constructor starts the worker (`start_process`) and sets `draft`; it calls the draft
    through `ask_draft` only.

    Attributes:
        options: the method's parameters.
        draft_spec: the model that the draft process loads.
        head_ids: target ids of the q columns; None when they are the same.
        q_buffer: float32 [drafts * slots, rows, Vd] for q's, the slots of each draft process in
            turn; shared with it where the channel shares memory. Elsewhere they give the process's
            own buffer its shape.
        remote_rows: each draft process's own buffer; None where memory is shared.
        draft: the conversation with the draft process.
        degraded: why the draft is gone, when the target goes on alone.
    """

    needs_draft = True
    asynchronous = True
    options: AsynchronousOptions
    draft: DraftClient

    def __init__(self, setup: DecoderSetup, options: AsynchronousOptions, rows: int) -> None:
        """Args: `rows` is how many q's of one sequence the buffer holds."""
        super().__init__(setup)
        self.options = options
        self.draft_spec = draft_spec_of(setup)
        ids = self.draft_spec.head_ids()
        self.head_ids = None if ids is None else ids.to(self.verifier.target.device)
        slots = len(setup.placement.draft_devices) * setup.batch_size
        self.q_buffer = share(slots, rows, self.draft_spec.width())
        self.remote_rows: list[RemoteRows | None] = []
        self.degraded: str | None = None

    def start_process(self, worker: WorkerFactory, arguments: List[Any]) -> DraftProcess:
        """Starts the next draft worker on its cores."""
        where, number = self.setup.placement, len(self.remote_rows)
        process = DraftProcess(worker, arguments, where.worker_cores(number), where.channel)
        self.remote_rows.append(process.remote_rows(self.q_rows(number).shape))
        return process

    def q_rows(self, number: int) -> torch.Tensor:
        """The part [slots, rows, Vd] of the buffer that is the draft process's of this number."""
        size = self.setup.batch_size
        return self.q_buffer[number * size : (number + 1) * size]

    def drawn(
        self, sequence: Sequence, tokens: List[int], places: List[int], number: int = 0
    ) -> Draft:
        """What a draft process drew, each token from the q at its place of the buffer."""
        if (remote := self.remote_rows[number]) is not None:
            return remote.draft(sequence.slot, places, tokens, self.head_ids)
        own: slice | list[int] = list(places)
        if isinstance(places, range):  # adjoining rows are not copied
            own = slice(places.start, places.stop)
        probs = self.q_rows(number)[sequence.slot, own]
        return Draft(torch.tensor(tokens, dtype=torch.int64), probs, self.head_ids)

    def ask_draft(
        self,
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result | None:
        """Calls the draft; None once it has failed and the target goes on alone."""
        if self.degraded is not None:
            return None
        try:
            return call(*args, **kwargs)
        except DraftProcessError as error:
            if self.options.on_draft_failure == "abort":
                raise
            self.degraded = str(error)
            self.draft.close()
            return None

    def close(self) -> None:
        """See `Decoder.close`."""
        self.draft.close()

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """What starting the draft took, its shared memory, and why it is gone."""
        facts: dict[str, float | int | str] = {
            "draft_start_s": self.draft.process.start_s,
            "q_buffer_bytes": self.q_buffer.nbytes,
        }
        if self.degraded is not None:
            facts["degraded"] = self.degraded
        return facts

    def _prefill(self, sequence: Sequence) -> None:
        self.ask_draft(self.draft.begin_prefill, sequence)
        super()._prefill(sequence)
        self.ask_draft(self.draft.end_prefill)

    def _forget(self, sequence: Sequence) -> None:
        self.ask_draft(self.draft.release, sequence)
