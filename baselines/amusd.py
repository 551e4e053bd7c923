"""AMUSD (arXiv 2410.17375): the draft never stops; the target verifies whatever is there.

    the draft, in its own process:   extend every sequence's chain, token by token
    a round of the target:           take what has been drafted since; wait only if that is nothing
                                     verify it in one pass
                                     mismatch: the draft rolls back and goes on behind the new token

The token that the draft drew next while the pass ran, if it is there, is judged in the place of the
bonus token, so that a chain that the target agrees with is never interrupted. If it is not there
the bonus token is drawn, and the draft goes on behind that.

Exact at temperature > 0, where the paper is greedy. Each drafted token comes with the q that it was
drawn from, and is judged once, by the verification that every method uses. What a verification
takes follows the clock and the number of tokens, never a token that it has not judged yet: given
that token i is taken, it was drawn from its q_i. Tokens drafted behind a rejected one are dropped,
also those still on their way, and their positions are drawn anew from another random stream. Tokens
behind an accepted one stay; their draws had no part in its acceptance.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from harness.decoder import DecoderSetup, Round, TuningGrid
from impl.engine.asynchronous_decoder import AsynchronousOptions
from impl.engine.chain_decoder import ChainDecoder


class AmusdOptions(AsynchronousOptions):
    """Parameters of AMUSD."""

    tuning_grid: ClassVar[TuningGrid] = {"max_verified": (3, 4, 6, 8, 12)}

    max_verified: int = Field(8, ge=1, le=64, description="most tokens the target is fed at once")
    max_ahead: int = Field(
        32, ge=2, le=256, description="most drafted tokens that wait; the q of each is kept"
    )
    fixed: bool = Field(
        False, description="wait for max_verified tokens each time, so that nothing follows the "
        "clock (what --deterministic does)"
    )  # fmt: skip


class AmusdDecoder(ChainDecoder):
    """The target's half; the draft's half is `ChainDrafter`, in a process on its own cores.

    In a batch one draft process extends all chains together, and a round of the target waits until
    each sequence has a token. So the round is as late as its latest sequence.
    """

    name = "amusd"
    Options = AmusdOptions
    options: AmusdOptions

    def __init__(self, setup: DecoderSetup, options: AmusdOptions) -> None:
        self.max_ahead = max(options.max_ahead, options.max_verified + 1)
        self.fixed = options.fixed or setup.deterministic
        super().__init__(setup, options, rows=self.max_ahead)

    @classmethod
    def create(cls, setup: DecoderSetup) -> AmusdDecoder:
        """See `Decoder.create`."""
        return cls(setup, AmusdOptions.model_validate(setup.options.model_dump()))

    def step(self) -> list[Round]:
        """One round of every live sequence; see the module docstring."""
        live, most = self.slots.live(), self.options.max_verified
        self.start_chains(live, self.max_ahead)
        idle = self.wait(live, [most if self.fixed else 1] * len(live))
        fed = self.unverified(live, [most] * len(live))
        logits, passing = self.verifier.score(live, fed)
        idle_again = self.wait(live, [most + 1 if self.fixed else 0] * len(live))
        spans = [*idle, passing, *idle_again]
        return self.conclude(live, fed, logits, spans, self.max_ahead)

    def ask_for_more(self) -> None:
        """Makes room for more drafted tokens where some have been accepted."""
        for sequence in self.slots.live():
            chain = self.draft.chain(sequence)
            if chain is not None and chain.allowed < chain.verified + self.max_ahead:
                self.ask_draft(self.draft.allow, sequence, chain.verified + self.max_ahead)
