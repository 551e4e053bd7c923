"""What each method does with a round: tokens for each sequence, time for all of them.

A schedule is told the outcomes of a round and says what was emitted and how long it took. All
scenarios of a method advance together; a step of the simulation is one round of each. The
assumptions behind each are in docs/simulator.md.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.simulation.acceptance import Outcomes
from harness.simulation.configurations import Configurations
from harness.simulation.scenario import Scenario, mean_rate
from impl.ssd.theory import (
    Backup,
    SpeedInputs,
    critical_batch_size,
    expected_tokens,
    hit_rate,
)

_MAX_AHEAD = 32.0  # drafted tokens that wait (the default of amusd.max_ahead)


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of every scenario.

    Attributes:
        emitted: tokens by scenario and slot, before a sequence's end cuts them.
        seconds: by scenario.
        stalled: by scenario, whether the target waited for a backup.
        hits: by scenario and slot; None without a speculation cache.
        judged: slots whose hit or miss counts.
    """

    emitted: np.ndarray
    seconds: np.ndarray
    stalled: np.ndarray
    hits: np.ndarray | None = None
    judged: np.ndarray | None = None


class Schedule(abc.ABC):
    """One method's."""

    def __init__(self, configurations: Configurations) -> None:
        self.configurations = configurations
        self._never = np.zeros(len(configurations), dtype=bool)

    @abc.abstractmethod
    def turn(self, number: int, outcomes: Outcomes) -> Turn:
        """The next round."""

    def restart(self, finished: np.ndarray) -> None:  # noqa: B027
        """New sequences take the place of the finished ones, by scenario and slot."""


class Autoregressive(Schedule):
    """One token, one pass."""

    def __init__(self, configurations: Configurations) -> None:
        super().__init__(configurations)
        self._verify = configurations.passes("verify_idle", lambda s: s.batch_size)
        self._one = np.ones_like(configurations.live, dtype=int)

    def turn(self, number: int, outcomes: Outcomes) -> Turn:  # noqa: ARG002
        """See `Schedule`."""
        return Turn(self._one, self._verify.at(self.configurations.sequences), self._never)


class Speculative(Schedule):
    """K draft passes, then one verification of K + 1 tokens a sequence."""

    def __init__(self, configurations: Configurations) -> None:
        super().__init__(configurations)
        c = configurations
        self._draft = c.passes("draft_idle", lambda s: s.batch_size)
        self._width = c.column(self.candidates)[:, None]
        self._verify = c.passes(
            "verify_idle", lambda s: s.batch_size * (s.lookahead * self.candidates(s) + 1)
        )

    @staticmethod
    def candidates(scenario: Scenario) -> int:  # noqa: ARG004
        """Tokens judged at each position."""
        return 1

    def turn(self, number: int, outcomes: Outcomes) -> Turn:
        """See `Schedule`."""
        c = self.configurations
        drafted = outcomes.drafted(number, c.lookahead)
        accepted = np.minimum(outcomes.accepted(number), drafted)
        verify = self._verify.at(((drafted * self._width + 1) * c.live).sum(axis=1))
        seconds = (drafted * c.live).max(axis=1) * self._draft.at(c.sequences) + verify
        further = self.further(number, accepted, drafted, outcomes)
        return Turn(accepted + 1 + further, seconds, self._never)

    def further(
        self,
        number: int,  # noqa: ARG002
        accepted: np.ndarray,
        drafted: np.ndarray,  # noqa: ARG002
        outcomes: Outcomes,  # noqa: ARG002
    ) -> np.ndarray:
        """Tokens besides those that a single chain brings."""
        return np.zeros_like(accepted)


class Tree(Speculative):
    """A trunk of the draft's K likeliest tokens, with width - 1 siblings at each position.

    Siblings come out of the pass that gives the trunk's token. Where the trunk ends the emitted
    token may be a sibling, and then the pass has judged what follows it too: one token more.
    """

    @staticmethod
    def candidates(scenario: Scenario) -> int:
        """See `Speculative`."""
        return scenario.width

    def further(
        self, number: int, accepted: np.ndarray, drafted: np.ndarray, outcomes: Outcomes
    ) -> np.ndarray:
        """See `Speculative`."""
        missed = outcomes.beyond(number, accepted, drafted, self._width - 1)
        return np.asarray((accepted < drafted) & ~missed)


class Amusd(Schedule):
    """The draft never stops; the target verifies what is there, K tokens at most.

    If all are accepted, the token drafted next, where it is there, is judged in the bonus token's
    place and the chain goes on; after a mismatch it begins anew, and the target waits for a token:
    for the pass that the draft is in, half of it on average, and for one more.
    """

    def __init__(self, configurations: Configurations) -> None:
        super().__init__(configurations)
        c = configurations
        self._idle = c.passes("draft_idle", lambda s: s.batch_size)
        self._draft = c.passes("draft_loaded", lambda s: s.batch_size)
        self._verify = c.passes("verify_loaded", lambda s: s.batch_size * (s.lookahead + 1))
        self._ahead = np.zeros(c.live.shape)  # tokens drafted and not judged, the next one's part
        self._corrected = np.zeros(c.live.shape, dtype=bool)  # the draft's last chain has ended

    def turn(self, number: int, outcomes: Outcomes) -> Turn:
        """See `Schedule`."""
        c = self.configurations
        draft = self._draft.at(c.sequences)[:, None]
        empty = (self._ahead < 1) & c.live
        passes = np.where((empty & self._corrected).any(axis=1), 1.5, 1.0)
        first = passes * self._idle.at(c.sequences) + c.transfer
        waited = np.where(empty.any(axis=1), first, 0.0)
        ahead = np.where(empty, 1.0, self._ahead + waited[:, None] / draft)
        fed = np.minimum(ahead.astype(int), c.lookahead[:, None])
        seconds = self._verify.at(((fed + 1) * c.live).sum(axis=1))
        ahead += seconds[:, None] / draft
        accepted = np.minimum(outcomes.accepted(number), fed)
        there = (accepted == fed) & (ahead >= fed + 1)
        goes_on = there & outcomes.next_accepted(number, accepted)
        self._ahead = np.where(goes_on, np.minimum(ahead - fed - 1, _MAX_AHEAD), 0.0)
        self._corrected = ~goes_on
        return Turn(accepted + 1, waited + seconds, np.asarray(empty.any(axis=1)))

    def restart(self, finished: np.ndarray) -> None:
        """See `Schedule`."""
        self._ahead[finished] = 0.0
        self._corrected[finished] = False


class Pearl(Schedule):
    """The draft drafts a block of K while the target verifies (Liu et al. 2024).

    Pre-verification, after a rejection: the target judges the block's first token while the rest
    is drafted. Post-verification: it judges the rest of a block, which it waits for, and the first
    token of the next one, which is drafted beside it; K tokens in all.
    """

    def __init__(self, configurations: Configurations) -> None:
        super().__init__(configurations)
        c = configurations
        self._draft = c.passes("draft_loaded", lambda s: s.batch_size)
        self._verify = c.passes("verify_loaded", lambda s: s.batch_size * (s.lookahead + 1))
        self._fresh = np.ones(c.live.shape, dtype=bool)  # no token of its block is verified
        self._rest = np.zeros(c.live.shape)  # seconds until the block that is judged next is there
        self._late = np.zeros(c.live.shape)  # seconds of the pass that a new block waits for

    def turn(self, number: int, outcomes: Outcomes) -> Turn:
        """See `Schedule`."""
        c = self.configurations
        draft, block = self._draft.at(c.sequences)[:, None], c.lookahead[:, None]
        waited = (self._rest * (c.live & ~self._fresh)).max(axis=1)
        judged = np.where(self._fresh, 1, block)
        verify = self._verify.at((judged * c.live).sum(axis=1))
        first = (np.where(self._fresh, draft + self._late, draft) * c.live).max(axis=1)
        passing = np.maximum(verify, first) + c.transfer
        drafted = np.where(self._fresh, (waited + passing)[:, None] - self._late, passing[:, None])
        accepted = np.minimum(outcomes.accepted(number), judged)
        all_accepted = accepted == judged
        self._rest = np.maximum(block * draft - drafted, 0.0)
        self._late = np.where(~all_accepted & (self._rest > 0), 0.5 * draft, 0.0)
        self._fresh = ~all_accepted
        emitted = np.where(all_accepted, judged, accepted + 1)
        return Turn(emitted, waited + passing, self._never)

    def restart(self, finished: np.ndarray) -> None:
        """See `Schedule`."""
        self._fresh |= finished
        self._late[finished] = 0.0


class Saguaro(Schedule):
    """SSD: the draft builds the speculation cache beside the verification.

    A round in which every sequence hits takes as long as verification or build, whichever is
    longer; one in which any misses takes a verification and its backup (DESIGN section 4).
    """

    def __init__(self, configurations: Configurations) -> None:
        super().__init__(configurations)
        c = configurations
        self._guesses = np.stack([_padded(s, c.longest) for s in c.scenarios])
        self._fast = np.array([uses_fast_backup(s) for s in c.scenarios])
        self._fast_lookahead = np.minimum(c.column(lambda s: s.fast_lookahead), c.lookahead)
        powers = np.arange(1, int(self._fast_lookahead.max()) + 1)
        chances = c.column(lambda s: s.fast_acceptance)[:, None] ** powers
        self._fast_survival = chances * (powers <= self._fast_lookahead[:, None])
        self._verify = c.passes("verify_loaded", lambda s: s.batch_size * (s.lookahead + 1))
        self._draft = c.passes("draft_idle", lambda s: s.batch_size)
        self._build = np.array([build_seconds(s) for s in c.scenarios])
        self._hit = np.zeros(c.live.shape, dtype=bool)
        self._first = np.ones(c.live.shape, dtype=bool)

    def turn(self, number: int, outcomes: Outcomes) -> Turn:
        """See `Schedule`."""
        c = self.configurations
        missed = ~self._hit & c.live
        fast = missed & self._fast[:, None] & ~self._first
        wanted = outcomes.drafted(number, c.lookahead)
        drafted = np.where(fast, self._fast_lookahead[:, None], wanted)
        waits = (missed & ~fast).sum(axis=1)
        stalled = np.asarray(missed.any(axis=1))
        verify = self._verify.at(((drafted + 1) * c.live).sum(axis=1))
        backup = (wanted * (missed & ~fast)).max(axis=1) * self._draft.at(waits)
        seconds = np.where(stalled, verify + backup, np.maximum(verify, self._build))
        accepted = np.minimum(outcomes.accepted(number), drafted)
        accepted = np.where(fast, self._fast_accepted(outcomes.uniform(number)), accepted)
        turn = Turn(accepted + 1, seconds + c.transfer, stalled, self._hit, ~self._first)
        guesses = np.take_along_axis(self._guesses, accepted, axis=1)
        self._hit = ~outcomes.beyond(number, accepted, drafted, guesses)
        self._first = np.zeros_like(self._first)
        return turn

    def _fast_accepted(self, draws: np.ndarray) -> np.ndarray:
        """Accepted tokens of the fast backup, whose tokens are accepted independently."""
        counts = np.zeros(self._hit.shape, dtype=np.int64)
        for chances in self._fast_survival.T:
            counts += draws < chances[:, None]
        return counts

    def restart(self, finished: np.ndarray) -> None:
        """See `Schedule`."""
        self._first |= finished
        self._hit &= ~finished


def _padded(scenario: Scenario, longest: int) -> np.ndarray:
    guesses = scenario.guesses()
    return np.pad(np.array(guesses), (0, longest + 1 - len(guesses)))


def build_seconds(scenario: Scenario) -> float:
    """T_p: a pass that ranks the guesses behind the last token, then K over every branch."""
    rows = np.array([scenario.batch_size, scenario.batch_size * max(1, scenario.budget)])
    model = scenario.profile.draft_loaded
    trunk, branches = model.seconds(rows, scenario.batch_size, scenario.context)
    return float(trunk + scenario.lookahead * branches)


def uses_fast_backup(scenario: Scenario) -> bool:
    """Whether a miss goes to the fast backup; `adaptive` decides by b* (`critical_batch_size`)."""
    if scenario.fallback != "adaptive":
        return scenario.fallback == "fast"
    fast = Backup(expected_tokens(scenario.fast_acceptance, scenario.fast_lookahead), 0.0)
    return scenario.batch_size >= critical_batch_size(speed_inputs(scenario), fast)


def speed_inputs(scenario: Scenario) -> SpeedInputs:
    """The scenario in the terms of `impl.ssd.theory`, with the draft model as the backup."""
    acceptance = scenario.independent
    k, batch = scenario.lookahead, scenario.batch_size
    rate = mean_rate(acceptance, k)
    profile, context = scenario.profile, scenario.context
    verify = profile.verify_loaded.seconds(np.array([batch * (k + 1)]), batch, context)[0]
    draft = profile.draft_idle.seconds(np.array([batch]), batch, context)[0]
    tokens = expected_tokens(rate, k)
    return SpeedInputs(
        hit_rate=hit_rate(rate, acceptance.exponent, scenario.guesses()),
        tokens_on_hit=tokens,
        build_time=float(build_seconds(scenario) / verify),
        backup=Backup(tokens, float(k * draft / verify)),
        batch_size=batch,
    )


SCHEDULES: Mapping[str, type[Schedule]] = {
    "ar": Autoregressive,
    "sd": Speculative,
    "tree": Tree,
    "amusd": Amusd,
    "pearl": Pearl,
    "ssd": Saguaro,
}
