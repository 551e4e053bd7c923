"""What every in-house method shares: slots, prefill, the verifier, and how rounds are recorded."""

from __future__ import annotations

from collections.abc import Sequence as List

from harness.decoder import Decoder, DecoderSetup, Request, Round, Span
from harness.errors import ModelError, RequestError
from impl.engine.language_model import LanguageModel
from impl.engine.sampling import Draft, Verification
from impl.engine.sequence import Sequence, SequenceSlots
from impl.engine.verifier import Verifier


class EngineDecoder(Decoder):
    """Base of the methods that run on this engine.

    A method overrides `step` and, where it keeps something of its own for each sequence, `_prefill`
    and `_forget`.
    """

    takes_synthetic = True

    def __init__(self, setup: DecoderSetup, *, tree_nodes: int = 0) -> None:
        """Allocates the target's cache.

        Args:
            setup: what the decoder is built from.
            tree_nodes: drafted tokens of one sequence that a context has no cells for, because
                they are rivals for the same positions.
        """
        target: LanguageModel = setup.models.target()
        if setup.max_context > target.max_position:
            raise ModelError(
                f"max_context: {setup.max_context} is beyond the target's "
                f"{target.max_position} positions"
            )
        self.setup = setup
        self.slots = SequenceSlots(setup.batch_size, setup.max_context)
        cache = target.new_cache(setup.batch_size, setup.max_context + tree_nodes)
        self.verifier = Verifier(target, cache)

    def start(self, requests: List[Request]) -> None:
        """See `Decoder.start`."""
        self._release_all()
        try:
            for request in requests:
                self.admit(request)
        except RequestError:
            self._release_all()
            raise

    def admit(self, request: Request) -> None:
        """See `Decoder.admit`."""
        self._prefill(self.slots.open(request))

    def release(self, request_id: str) -> None:
        """See `Decoder.release`."""
        self._forget(self.slots.close(request_id))

    def close(self) -> None:
        """See `Decoder.close`."""

    def _release_all(self) -> None:
        for sequence in self.slots.all():
            self.release(sequence.request.request_id)

    def _prefill(self, sequence: Sequence) -> None:
        self.verifier.prefill(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Called when a sequence gives up its slot."""


def settle(
    sequence: Sequence,
    draft: Draft,
    outcome: Verification,
    spans: List[Span] = (),
) -> Round:
    """Appends what a verification emitted to its sequence and writes the round down."""
    drafted: list[int] = draft.tokens.tolist()
    accepted = [drafted[node] for node in outcome.nodes]
    return Round(
        request_id=sequence.request.request_id,
        tokens=sequence.append([*accepted, outcome.token]),
        drafted=len(drafted),
        accepted=outcome.accepted + outcome.token_drafted,
        spans=tuple(spans),
        finish=sequence.finish,
    )
