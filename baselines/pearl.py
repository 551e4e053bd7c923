"""PEARL (arXiv 2408.11850): the draft drafts the next block while the target verifies this one.

    pre-verify:   the target's pass is over the text alone and judges the first token of the block
                  that the draft is drafting beside it
                  accepted: post-verify, with the rest of that block; rejected: pre-verify again
    post-verify:  the target's pass is over the rest of a block, and judges that and the first token
                  of the next block, which the draft is drafting beside it
                  all accepted: post-verify, with the rest of the next block
                  one rejected: pre-verify, behind the token emitted in its place

So a block's first token is always verified one round before the others, pre-verify is post-verify
with nothing left of the last block, and a round emits the target's own token only after a rejection
or at the end of a text. A block has as many tokens as the draft draws during one target pass, by
the times measured so far.

Exact at temperature > 0. The next block is drafted on the premise that this one is accepted whole.
If so, its tokens stand behind the very text that they were drawn for, each with its q, and their
draws had no part in the acceptance: they are a draft as good as any. The first one is judged in the
place of the bonus token: accepted, or replaced from the residual, it follows the target as the
bonus token would. If a token is rejected the next block is dropped unseen, and its positions are
drawn anew from another random stream. The verifier's numbers are a stream of their own: the public
code seeds the draft's draws and the acceptance alike by the position, so that a token is judged by
a number that depends on the one that drew it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from harness.decoder import DecoderSetup, Round, Span, TuningGrid
from impl.engine.asynchronous_decoder import AsynchronousOptions
from impl.engine.chain_decoder import ChainDecoder
from impl.engine.sequence import Sequence

MAX_AUTO_LOOKAHEAD = 16
FIRST_LOOKAHEAD = 4  # before anything is measured, and where nothing may follow the clock
_SMOOTHING = 0.1  # weight of the newest pass in a running mean


class PearlOptions(AsynchronousOptions):
    """Parameters of PEARL."""

    tuning_grid: ClassVar[TuningGrid] = {"lookahead": (2, 3, 4, 6, 8, "auto")}

    lookahead: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        "auto",
        description="tokens of a block; auto: the draft passes that fit beside one target pass",
    )


class SpeedRatio:
    """How many draft passes take as long as one target pass: the best block."""

    def __init__(self) -> None:
        self._target_ns: float | None = None
        self._draft_ns: float | None = None

    def observe(self, target: Span, draft: Iterable[Span]) -> None:
        """Learns from a target pass and the draft passes reported since the last one."""
        self._target_ns = _mean(self._target_ns, target)
        for span in draft:
            self._draft_ns = _mean(self._draft_ns, span)

    def lookahead(self) -> int:
        """The block's length by what was measured so far."""
        if not self._target_ns or not self._draft_ns:
            return FIRST_LOOKAHEAD
        return min(max(1, round(self._target_ns / self._draft_ns)), MAX_AUTO_LOOKAHEAD)


class PearlDecoder(ChainDecoder):
    """The target's half; the draft's half is `ChainDrafter`, in a process on its own cores.

    A chain's `allowed` is the end of the block being drafted. In a batch each sequence is in
    pre-verify or post-verify for itself; a round waits for the latest block.
    """

    name = "pearl"
    Options = PearlOptions
    options: PearlOptions

    def __init__(self, setup: DecoderSetup, options: PearlOptions) -> None:
        longest = MAX_AUTO_LOOKAHEAD if options.lookahead == "auto" else options.lookahead
        super().__init__(setup, options, rows=2 * longest)  # a block and the next one
        self.ratio = SpeedRatio()

    @classmethod
    def create(cls, setup: DecoderSetup) -> PearlDecoder:
        """See `Decoder.create`."""
        return cls(setup, PearlOptions.model_validate(setup.options.model_dump()))

    @property
    def lookahead(self) -> int:
        """Tokens of the next block."""
        if self.options.lookahead != "auto":
            return self.options.lookahead
        return FIRST_LOOKAHEAD if self.setup.deterministic else self.ratio.lookahead()

    def step(self) -> list[Round]:
        """One round of every live sequence; see the module docstring."""
        live, lookahead = self.slots.live(), self.lookahead
        self.start_chains(live, lookahead)
        rests = [self._rest_of_block(sequence) for sequence in live]
        idle = self.wait(live, rests)
        fed = self.unverified(live, rests)
        self._draft_next_blocks(live, lookahead)
        logits, passing = self.verifier.score(live, fed)
        idle_again = self.wait(live, [rest + 1 for rest in rests])
        self.ratio.observe(passing, self.draft.passes)
        return self.conclude(live, fed, logits, [*idle, passing, *idle_again], lookahead)

    def diagnostics(self) -> Mapping[str, float | int | str]:
        """The length of a block, beside what every draft says."""
        return {**super().diagnostics(), "lookahead": self.lookahead}

    def _rest_of_block(self, sequence: Sequence) -> int:
        """How many tokens behind its first, verified one a block has; 0 in pre-verify."""
        chain = self.draft.chain(sequence)
        return 0 if chain is None or not chain.verified else chain.allowed - chain.verified

    def _draft_next_blocks(self, live: List[Sequence], lookahead: int) -> None:
        """Post-verify: the draft goes on to the next block, beside the pass that comes."""
        for sequence in live:
            chain = self.draft.chain(sequence)
            if chain is not None and chain.verified:
                self.ask_draft(self.draft.allow, sequence, chain.allowed + lookahead)


def _mean(mean: float | None, span: Span) -> float:
    """Exponential running mean of durations."""
    duration = float(span.end_ns - span.start_ns)
    return duration if mean is None else mean + _SMOOTHING * (duration - mean)
