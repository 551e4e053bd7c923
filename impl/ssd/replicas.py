"""Several drafts, each with the whole draft model on a device of its own, as one for the decoder.

Every replica has all sequences and their trunks, and guesses the same outcomes, N times as many as
one draft would; guess i is prepared by replica i modulo N alone. A round:

    all        look the outcomes up and tell what they have; nobody drafts yet
    owner      of a sequence: the first replica with a hit, else replica 0. It completes the hit
               where that is worth it, or drafts the backup
    all        adopt what others own as their trunk, and fill their part of the caches

Who owns a sequence depends on who has begun its branch, never on the tokens in it or on who is
quicker, so the choice cannot favour some tokens over others. A replica draws from the streams that
one draft would (`draft_uniform`), so all would draft the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Any

from harness.decoder import CacheOutcome, Span, SpanKind
from impl.engine.channel import Channel
from impl.engine.draft_client import Release
from impl.engine.draft_process import DraftProcess
from impl.engine.sampling import Verification
from impl.engine.sequence import Sequence
from impl.ssd.client import Received, SpeculationClient
from impl.ssd.messages import Ask, Complete, Proceed, Speculate, Speculation
from impl.ssd.policy import Policy
from impl.ssd.speculation import SequenceSpeculation
from impl.ssd.speculator import Speculator


class Replica(Speculator):
    """The worker; see the module docstring."""

    def __init__(self, *arguments: Any) -> None:
        """Args: those of `Speculator`, then the replica's number and how many there are."""
        *rest, self.number, self.count = arguments
        super().__init__(*rest)
        self.policy = Policy(self.options, deterministic=self.deterministic, replicas=self.count)
        self.asked: dict[str, Ask] = {}  # since the last `Proceed`
        self.unready: set[SequenceSpeculation] = set()

    def _take(self, message: Any, channel: Channel, listening_ns: int) -> None:
        start_ns = time.perf_counter_ns()
        match message:
            case Speculate(asked):
                self.asked |= {ask.request_id: ask for ask in asked}
                states = self._look_up(asked, start_ns)
                hits = [state for state in states if state.after is CacheOutcome.HIT]
                self.unready |= {*states} - {*hits} | {*self._growing(hits)}
                channel.send(self._tell(states, listening_ns, start_ns))
            case Complete(request_ids):
                states = [self.sequences[request_id] for request_id in request_ids]
                self.unready -= {*states}
                self._complete_trunks(states)
                channel.send(self._tell(states, listening_ns, start_ns))
            case Proceed(adopted):
                self._proceed(adopted)
            case _:
                if isinstance(message, Release):
                    self.asked.pop(message.request_id, None)
                super()._take(message, channel, listening_ns)

    def _hand_over(self, state: SequenceSpeculation) -> Speculation:
        if state not in self.unready:
            handed = super()._hand_over(state)
            return handed._replace(confidences=tuple(state.trunk.confidences))
        return Speculation(
            request_id=state.sequence.request.request_id,
            tokens=(),
            cache=state.after,
            backup=None,
            guesses=state.guesses,
            hit_chance=state.hit_chance,
            rank=state.rank,
            ready=False,
        )

    def _proceed(self, adopted: List[Speculation]) -> None:
        for item in adopted:
            state = self.sequences[item.request_id]
            state.adopt(item.tokens, item.confidences, item.cache, item.backup)
        asked, self.asked = [*self.asked.values()], {}
        self.unready.clear()
        trunks = [self.sequences[ask.request_id].trunk for ask in asked]
        self.verifying = sum(trunk.drafted + 1 for trunk in trunks)
        self._end_round(asked)
        self._begin_caches(asked)

    def _share(self, before: int) -> slice:
        return slice((self.number - before) % self.count, None, self.count)


class ReplicaClient(SpeculationClient):
    """The conversation with one replica."""

    def complete(self, sequences: List[Sequence]) -> None:
        """Lets it draft what it lacks of these, for the next `receive`."""
        if names := tuple(sequence.request.request_id for sequence in sequences):
            self.process.send(Complete(names))
            self._outstanding.update(names)


class ReplicatedClient(SpeculationClient):
    """The conversation with all replicas.

    Attributes:
        replicas: those with each of them, by number.
    """

    def __init__(self, *processes: DraftProcess) -> None:
        super().__init__(processes[0])
        self.replicas = [ReplicaClient(process) for process in processes]

    def begin_prefill(self, sequence: Sequence) -> None:
        """See `DraftClient.begin_prefill`."""
        for replica in self.replicas:
            replica.begin_prefill(sequence)

    def end_prefill(self) -> None:
        """See `DraftClient.end_prefill`."""
        for replica in self.replicas:
            replica.end_prefill()

    def release(self, sequence: Sequence) -> None:
        """See `DraftClient.release`."""
        for replica in self.replicas:
            replica.release(sequence)

    def close(self) -> None:
        """Ends the draft processes."""
        for replica in self.replicas:
            replica.close()

    def report(self, sequences: List[Sequence], outcomes: List[Verification]) -> None:
        """See `SpeculationClient.report`."""
        for replica in self.replicas:
            replica.report(sequences, outcomes)

    def receive(self, live: List[Sequence]) -> Received:
        """See `SpeculationClient.receive`."""
        heard = [replica.receive(live) for replica in self.replicas]
        heard_ns = time.perf_counter_ns()
        offers = [*zip(*(received.speculations for received in heard), strict=True)]
        owners = [_owner(own) for own in offers]
        late = [
            [
                sequence
                for sequence, own, owner in zip(live, offers, owners, strict=True)
                if owner == number and not own[owner].ready
            ]
            for number in range(len(self.replicas))
        ]
        for replica, sequences in zip(self.replicas, late, strict=True):
            replica.complete(sequences)
        asking = Span(SpanKind.TRANSFER, heard_ns, time.perf_counter_ns())
        completed = [
            replica.receive(sequences)
            for replica, sequences in zip(self.replicas, late, strict=True)
        ]
        drafted_ns = time.perf_counter_ns()
        drafted = {item.request_id: item for each in completed for item in each.speculations}
        speculations = [
            _merged(drafted.get(own[owner].request_id, own[owner]), own, owner)
            for own, owner in zip(offers, owners, strict=True)
        ]
        for number, replica in enumerate(self.replicas):
            adopted = (item for item in speculations if item.replica != number)
            replica.process.send(Proceed(tuple(adopted)))
        self.latest = self.replicas[0].latest
        telling = Span(SpanKind.TRANSFER, drafted_ns, time.perf_counter_ns())
        before, after = ([s for each in part for s in each.spans] for part in (heard, completed))
        return Received(speculations, [*before, asking, *after, telling])


def _owner(offers: List[Speculation]) -> int:
    """The number of the first replica with a hit, else of the first."""
    hits = [n for n, offer in enumerate(offers) if offer.cache is CacheOutcome.HIT]
    return hits[0] if hits else 0


def _merged(handed: Speculation, offers: Iterable[Speculation], owner: int) -> Speculation:
    """What the target is given of a sequence, with what all replicas had guessed of it."""
    chances = [offer.hit_chance for offer in offers if offer.hit_chance is not None]
    return handed._replace(
        guesses=sum(offer.guesses for offer in offers),
        hit_chance=sum(chances) if chances else None,
        replica=owner,
    )
