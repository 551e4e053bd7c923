"""The draft process of SSD: answers outcomes, and speculates ahead while the target verifies.

    loop:
        if no message waits and a cache is worth filling: one pass over the likeliest branches
        else: receive
            Speculate(outcomes): look each up; a hit becomes the trunk at once, a miss is drafted
            by the backup; answer; then the caches are filled for the outcomes of this answer

The draft looks for a message between passes, so an early outcome waits for one pass at most, and a
branch that is hit before it is complete is completed alone. What to do is `Policy`'s to say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as List
from typing import Any

import torch

from harness.decoder import CacheOutcome, Span, SpanKind
from harness.errors import NonFiniteLogitsError
from impl.engine.channel import Channel
from impl.engine.device import upload
from impl.engine.device_process import Close
from impl.engine.draft_client import Prefill, Prefilled, Release
from impl.engine.drafter import draft_uniform, draw
from impl.engine.models import ModelSpec
from impl.engine.sequence import Sequence
from impl.engine.token_batch import Segment, TokenBatch
from impl.ssd.calibration import exercise
from impl.ssd.messages import (
    Ask,
    Exercise,
    Exercised,
    Speculate,
    Speculation,
    Speculations,
    TakeCosts,
)
from impl.ssd.options import SaguaroOptions
from impl.ssd.policy import Policy, Verdict
from impl.ssd.saguaro_sampling import reweight
from impl.ssd.speculation import Path, SequenceSpeculation, tree_capacity
from impl.ssd.speculation_cache import Outcome, guesses

Feeding = dict[SequenceSpeculation, list[Path]]  # which paths of each sequence a pass feeds


class Speculator:
    """The worker; see the module docstring."""

    def __init__(
        self,
        spec: ModelSpec,
        options: SaguaroOptions,
        q_buffer: torch.Tensor,
        max_context: int,
        deterministic: bool,
    ) -> None:
        """Loads the draft model.

        Args:
            spec: the draft model.
            options: the method's parameters.
            q_buffer: shared float32 [slots, K, Vd], where the q rows of each answer go.
            max_context: most tokens of one sequence.
            deterministic: complete the cache before looking for a message.
        """
        self.options = options
        self.model = spec.load()
        ids = self.model.head_ids
        self.ids = None if ids is None else ids.cpu()  # for look-ups, which never wait for a GPU
        self.policy = Policy(options, deterministic=deterministic)
        self.q_buffer = q_buffer
        self.max_context = max_context
        self.deterministic = deterministic
        self.capacity = tree_capacity(options.max_lookahead, options.max_budget)
        self.cache = self.model.new_cache(len(q_buffer), max_context + self.capacity)
        self.sequences: dict[str, SequenceSpeculation] = {}
        self.speculating: list[Span] = []
        self.answered_ns = 0  # when the last answer went out; 0 where no round lies between
        self.verifying = 0  # tokens that the target verifies since

    def serve(self, channel: Channel) -> None:
        """Works until told to close."""
        channel.offer(self.q_buffer)
        while True:
            unfinished = self._unfinished()
            if unfinished and (self.deterministic or not channel.poll()):
                self._speculate(unfinished)
                continue
            listening_ns = time.perf_counter_ns()
            message = channel.receive()
            if isinstance(message, Close):
                return
            self._take(message, channel, listening_ns)

    def _take(self, message: Any, channel: Channel, listening_ns: int) -> None:
        """Does what a message asks, for which the draft had listened since `listening_ns`."""
        match message:
            case Speculate(asked):
                channel.send(self._answer(asked, listening_ns))
                self._end_round(asked)
                self._begin_caches(asked)
            case Prefill(request):
                self._prefill(message)
                channel.send(Prefilled(request.request_id))
            case Release(request_id):
                del self.sequences[request_id]
                self.answered_ns = 0
            case Exercise(tokens):
                channel.send(Exercised(exercise(self.model, self.cache, tokens, channel)))
            case TakeCosts(costs, batch_size):
                self.policy.take_costs(costs, batch_size)

    def _prefill(self, message: Prefill) -> None:
        sequence = Sequence(message.request, message.slot, self.max_context)
        self.model.prefill(self.cache, message.slot, sequence.tokens[:-1])
        self.answered_ns = 0
        self.sequences[message.request.request_id] = SequenceSpeculation(
            sequence, self.policy.lookahead, self.capacity, self.options.max_budget
        )

    # Answering: look the outcome up; the backup drafts what is missing.

    def _answer(self, asked: List[Ask], listening_ns: int) -> Speculations:
        start_ns = time.perf_counter_ns()
        states = self._look_up(asked, start_ns)
        self._complete_trunks(states)
        return self._tell(states, listening_ns, start_ns)

    def _look_up(self, asked: List[Ask], start_ns: int) -> list[SequenceSpeculation]:
        """Settles what the target decided until `start_ns`; a hit becomes the trunk."""
        if self.answered_ns:
            verified_s = (start_ns - self.answered_ns) / 1e9
            working_s = sum(span.end_ns - span.start_ns for span in self.speculating) / 1e9
            self.policy.observe_verification(verified_s, self.verifying, working_s)
        states = [self.sequences[ask.request_id] for ask in asked]
        if unfed := [state for state in states if state.given and not state.trunk.nodes]:
            self._pass({state: [state.trunk] for state in unfed})  # or they would pile up
        for state, ask in zip(states, asked, strict=True):
            if ask.outcome is not None:
                self._resolve(state, ask.outcome)
        return states

    def _tell(
        self, states: List[SequenceSpeculation], listening_ns: int, start_ns: int
    ) -> Speculations:
        """Hands over what there is, drafted since `start_ns`."""
        drafted_ns = time.perf_counter_ns()
        items = [self._hand_over(state) for state in states]
        self.verifying = sum(len(item.tokens) + 1 for item in items)
        spans = [
            *self.speculating,
            Span(SpanKind.TRANSFER, listening_ns, start_ns),
            Span(SpanKind.DRAFT, start_ns, drafted_ns),
            Span(SpanKind.TRANSFER, drafted_ns, time.perf_counter_ns()),
        ]
        self.speculating = []
        policy = self.policy
        return Speculations(
            tuple(items), tuple(spans), policy.lookahead, policy.budget, policy.critical_batch_size
        )

    def _resolve(self, state: SequenceSpeculation, outcome: Outcome) -> None:
        self._learn(state, outcome)
        state.lookahead = self.policy.lookahead
        if state.backup == "fast":
            self.policy.observe_fast(outcome.accepted, state.trunk.drafted)
        slot = state.sequence.slot
        self.cache.truncate(slot, state.tree.trunk)
        self.cache.gather(slot, state.resolve(outcome))

    def _complete_trunks(self, states: List[SequenceSpeculation]) -> None:
        """Drafts for misses and first speculations, and completes hits that were cut short."""
        missed = [state for state in states if state.after is CacheOutcome.MISS]
        for state in missed:
            found = state.ngrams.continuation(state.trunk.wanted)
            state.backup = self.policy.backup(len(self.sequences), bool(found))
            state.given = state.backup == "fast"
            if state.given:
                self._draft_fast(state.trunk, found)
        start = time.perf_counter()
        while growing := self._growing(states):
            self._pass({state: [state.trunk] for state in growing})
        if any(state.backup == "neural" for state in missed):
            self.policy.observe_backup(time.perf_counter() - start)

    def _growing(self, states: List[SequenceSpeculation]) -> list[SequenceSpeculation]:
        """Whose trunks one more pass extends while the target waits; none where it does not pay."""
        growing = [state for state in states if self._wants_more(state.trunk, state.after)]
        if growing and all(state.trunk.drafted for state in growing):  # one at least: to learn from
            trunks = [state.trunk for state in growing]
            if not self.policy.worth_drafting(trunks, [state.after for state in growing]):
                return []
        return growing

    def _wants_more(self, path: Path, after: CacheOutcome | None) -> bool:
        if path.complete:
            return False
        return not path.drafted or self.policy.worth_verifying(path, after)

    def _draft_fast(self, trunk: Path, found: list[int]) -> None:
        if not found and self.options.fallback == "fast":
            found = [trunk.tokens[0]] * trunk.wanted
        trunk.wanted = min(len(found), self.policy.fast_length(trunk.wanted))
        trunk.tokens += found[: trunk.wanted]

    def _hand_over(self, state: SequenceSpeculation) -> Speculation:
        trunk = state.trunk
        trunk.wanted = trunk.drafted
        if trunk.q:
            rows = torch.stack(trunk.q)
            self.q_buffer[state.sequence.slot, : len(rows)] = rows
        return Speculation(
            request_id=state.sequence.request.request_id,
            tokens=tuple(trunk.tokens[1:]),
            cache=state.after,
            backup=state.backup,
            guesses=state.guesses,
            hit_chance=state.hit_chance,
            rank=state.rank,
        )

    # Speculating ahead: branches for the likely outcomes of what was handed over.

    def _begin_caches(self, asked: List[Ask]) -> None:
        for ask in asked:
            state = self.sequences[ask.request_id]
            ahead = self.policy.budget or state.given  # whose tokens are still to feed
            if ahead and state.sequence.draft_limit(1):  # else no round follows
                state.building = True
                self._open_branches(state)

    def _open_branches(self, state: SequenceSpeculation) -> None:
        """Guesses the outcomes at every position of the trunk whose logits have become known."""
        trunk, first = state.trunk, state.opened
        known = len(trunk.logits)
        if known == first or known < trunk.drafted:  # a fast backup has not been fed yet
            return
        if state.fan_out is None:
            state.fan_out = self.policy.fan_out(state.after, self._confidences(state))
        state.opened = known
        outcomes = guesses(
            torch.stack(trunk.logits[first:]),
            trunk.tokens[1:],
            state.fan_out[first:known],
            ids=self.model.head_ids,
            first=first,
        )
        chances = self.policy.chances(self._confidences(state), outcomes)
        own = self._share(sum(state.fan_out[:first]))
        state.elsewhere.update({*outcomes} - {*outcomes[own]})
        state.open_branches(outcomes[own], chances[own])

    def _share(self, before: int) -> slice:  # noqa: ARG002
        """Which of the guesses behind the first `before` ones this draft prepares for: all."""
        return slice(None)

    def _confidences(self, state: SequenceSpeculation) -> list[float]:
        """The draft's probability of each token of the trunk, also of those a backup proposed."""
        trunk = state.trunk
        if len(trunk.confidences) < trunk.drafted:
            tokens = trunk.tokens[1:]
            rows = torch.stack(trunk.logits[: len(tokens)]).softmax(-1)
            columns = [_column(self.ids, token, rows.shape[1]) for token in tokens]
            kept = torch.tensor([column or 0 for column in columns])
            likely = rows.gather(1, upload(kept, rows.device)[:, None])[:, 0].tolist()
            trunk.confidences = [
                0.0 if column is None else chance
                for chance, column in zip(likely, columns, strict=True)
            ]
        return trunk.confidences

    def _unfinished(self) -> list[SequenceSpeculation]:
        return [state for state in self.sequences.values() if state.building]

    def _speculate(self, states: List[SequenceSpeculation]) -> None:
        start_ns = time.perf_counter_ns()
        if feeding := self._likeliest(states):
            rows = self._pass(feeding)
            end_ns = time.perf_counter_ns()
            self.speculating.append(Span(SpanKind.SPECULATE, start_ns, end_ns))
            self.policy.observe_pass((end_ns - start_ns) / 1e9, rows)
            return
        for state in states:
            state.building = False

    def _likeliest(self, states: List[SequenceSpeculation]) -> Feeding:
        """What a pass beside the verification feeds: what was handed over, then branches."""
        feeding = {state: [state.trunk] for state in states if not state.trunk.fed}
        owner = {
            path: state
            for state in states
            for path in state.cache.values()
            if self._wants_more(path, CacheOutcome.HIT)
        }
        given = sum(len(state.trunk.tokens) - len(state.trunk.nodes) for state in feeding)
        for path in self.policy.likeliest(list(owner), given, self._remaining_s()):
            feeding.setdefault(owner[path], []).append(path)
        return feeding

    def _remaining_s(self) -> float:
        """Until the verification is expected to end; endless where its beginning is not known."""
        if not self.answered_ns:
            return math.inf
        elapsed = (time.perf_counter_ns() - self.answered_ns) / 1e9
        return self.policy.expected_verification(self.verifying) - elapsed

    # One forward pass over what has not been fed yet.

    def _pass(self, feeding: Feeding) -> int:
        """Feeds these paths' new tokens; each path that is incomplete draws its next one.

        Returns:
            How many tokens it fed.
        """
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for state, paths in feeding.items():
            tree = state.tree
            first = len(tree)
            for path in paths:
                state.feed(path)
            tokens += tree.tokens[first:]
            positions += tree.positions(first)
            count = len(tree) - first
            segments.append(
                Segment(state.sequence.slot, tree.trunk + first, count, tree.mask(first))
            )
        batch = TokenBatch.pack(tokens, positions, segments)
        logits = self.model.forward(batch, self.cache)
        counts = [segment.count for segment in segments]
        rows = torch.split(logits, counts)
        for (state, paths), part in zip(feeding.items(), rows, strict=True):
            self._grow(state, paths, part)
        return len(tokens)

    def _grow(self, state: SequenceSpeculation, paths: List[Path], rows: torch.Tensor) -> None:
        """Hands the paths the logits [new nodes, Vd] of what was fed; draws what is wanted."""
        first = len(state.tree) - len(rows)
        for path in paths:
            path.logits += [rows[node - first] for node in path.nodes[len(path.logits) :]]
        if state.building:
            self._open_branches(state)
        if growing := [path for path in paths if not path.complete]:
            self._draw(state, growing)

    def _draw(self, state: SequenceSpeculation, paths: List[Path]) -> None:
        sequence, params = state.sequence, state.sequence.request.sampling
        starts = [sequence.output_length + path.ahead for path in paths]
        uniforms = [
            draft_uniform(sequence.stream, start, path.tokens[0], path.drafted)
            for start, path in zip(starts, paths, strict=True)
            if params.temperature > 0
        ]
        logits = torch.stack([path.logits[-1] for path in paths])
        try:
            drawn = draw(logits, params, uniforms, self.model.head_ids, self._reweight)
        except NonFiniteLogitsError as error:
            sound = logits.amax(-1).isfinite().tolist()  # NaN counts as largest
            at = min(
                start + path.drafted
                for start, path, good in zip(starts, paths, sound, strict=True)
                if not good
            )
            raise NonFiniteLogitsError(
                f"request {sequence.request.request_id}, output position {at}: draft {error}"
            ) from error
        for i, path in enumerate(paths):
            path.tokens.append(drawn.tokens[i])
            path.confidences.append(drawn.confidences[i])
            path.reach = self.policy.reach(path, drawn.confidences[i])
            if drawn.q is not None:
                path.q.append(drawn.q[i])

    def _reweight(self, q: torch.Tensor) -> torch.Tensor:
        return reweight(q, self.options.saguaro_top, self.options.saguaro_c)

    # Learning from what the target decided.

    def _end_round(self, asked: List[Ask]) -> None:
        """Learns how long the round took that ended with these outcomes."""
        now_ns, before_ns = time.perf_counter_ns(), self.answered_ns
        self.answered_ns = now_ns
        emitted = [ask.outcome.accepted + 1 for ask in asked if ask.outcome is not None]
        if before_ns and emitted:
            seconds = (now_ns - before_ns) / 1e9
            self.policy.observe_round(sum(emitted), seconds, len(emitted))

    def _learn(self, state: SequenceSpeculation, outcome: Outcome) -> None:
        trunk, state.rank = state.trunk, None
        if outcome.accepted >= len(trunk.logits) or len(trunk.confidences) < trunk.drafted:
            return  # the trunk's end, or a fast backup, had not been fed when the outcome came
        state.rank = self._rank(state, outcome)
        self.policy.observe(
            Verdict(
                after=state.after,
                backup=state.backup,
                confidences=tuple(trunk.confidences),
                accepted=outcome.accepted,
                rank=state.rank,
                missed=state.cache.lookup(outcome) is None and outcome not in state.elsewhere,
            )
        )

    def _rank(self, state: SequenceSpeculation, outcome: Outcome) -> int | None:
        """1-based place of t* among what would have been guessed at its position."""
        row, drafted = state.trunk.logits[outcome.accepted], state.trunk.tokens[1:]
        column = _column(self.ids, outcome.token, len(row))
        if column is None:
            return None
        above = int((row > row[column]).sum())
        if outcome.accepted < len(drafted):
            rejected = _column(self.ids, drafted[outcome.accepted], len(row))
            above -= int(rejected is not None and bool(row[rejected] > row[column]))
        return above + 1


def _column(ids: torch.Tensor | None, token: int, size: int) -> int | None:
    """Where a token's logit is; None when the head was trimmed of it."""
    if ids is None:
        return token if token < size else None
    column = int(torch.searchsorted(ids, token))
    return column if column < size and int(ids[column]) == token else None
