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
        q_buffer: float32 [slots, rows, Vd] for q's, shared with the draft process where the channel
            shares memory. Elsewhere it gives the draft's own buffer its shape.
        remote_rows: the draft's own buffer; None where memory is shared.
        draft: the conversation with the draft process.
        degraded: why the draft is gone, when the target goes on alone.
    """

    needs_draft = True
    asynchronous = True
    options: AsynchronousOptions
    draft: DraftClient
    remote_rows: RemoteRows | None = None

    def __init__(self, setup: DecoderSetup, options: AsynchronousOptions, rows: int) -> None:
        """Args: `rows` is how many q's of one sequence the buffer holds."""
        super().__init__(setup)
        self.options = options
        self.draft_spec = draft_spec_of(setup)
        ids = self.draft_spec.head_ids()
        self.head_ids = None if ids is None else ids.to(self.verifier.target.device)
        self.q_buffer = share(setup.batch_size, rows, self.draft_spec.width())
        self.degraded: str | None = None

    def start_process(self, worker: WorkerFactory, arguments: List[Any]) -> DraftProcess:
        """Starts the worker on the draft's cores."""
        where = self.setup.placement
        process = DraftProcess(worker, arguments, where.draft_cores, where.channel)
        self.remote_rows = process.remote_rows(self.q_buffer.shape)
        return process

    def drawn(self, sequence: Sequence, tokens: List[int], places: List[int]) -> Draft:
        """What the draft process drew, each token from the q at its place of the buffer."""
        if self.remote_rows is not None:
            return self.remote_rows.draft(sequence.slot, places, tokens, self.head_ids)
        own: slice | list[int] = list(places)
        if isinstance(places, range):  # adjoining rows are not copied
            own = slice(places.start, places.stop)
        probs = self.q_buffer[sequence.slot, own]
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
