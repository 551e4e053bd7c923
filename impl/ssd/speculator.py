"""The draft process of SSD: answers outcomes, and speculates ahead while the target verifies.

    loop:
        if no message waits and the cache is not complete: one pass over all trunks and branches
        else: receive
            Speculate(outcomes): look each up; a hit becomes the trunk at once, a miss is drafted
            just in time; answer; then the cache is built for the outcomes of this answer

The draft looks for a message between passes, so an early outcome waits for one pass at most, and a
branch that is hit before it is complete is completed alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List

import torch

from harness.decoder import CacheOutcome, Span, SpanKind
from harness.errors import NonFiniteLogitsError
from impl.engine.channel import Channel
from impl.engine.draft_process import Close
from impl.engine.drafter import draw
from impl.engine.models import ModelSpec
from impl.engine.randomness import Role
from impl.engine.sequence import Sequence
from impl.engine.token_batch import Segment, TokenBatch
from impl.ssd.fan_out import AdaptiveFanOut, FanOut, geometric, uniform
from impl.ssd.messages import Ask, Prefill, Prefilled, Release, Speculate, Speculation, Speculations
from impl.ssd.options import SaguaroOptions
from impl.ssd.speculation import Path, SequenceSpeculation
from impl.ssd.speculation_cache import Outcome, guesses


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
        self.q_buffer = q_buffer
        self.max_context = max_context
        self.deterministic = deterministic
        scratch = (2 + options.lookahead) + options.budget * (1 + options.lookahead)
        self.cache = self.model.new_cache(len(q_buffer), max_context + scratch)
        self.sequences: dict[str, SequenceSpeculation] = {}
        self.adaptive = AdaptiveFanOut()
        self.speculating: list[Span] = []

    def serve(self, channel: Channel) -> None:
        """Works until told to close."""
        while True:
            unfinished = self._unfinished()
            if unfinished and (self.deterministic or not channel.poll()):
                self._speculate(unfinished)
                continue
            match channel.receive():
                case Speculate(asked):
                    channel.send(self._answer(asked))
                    self._open_caches(asked)
                case Prefill() as message:
                    self._prefill(message)
                    channel.send(Prefilled(message.request.request_id))
                case Release(request_id):
                    del self.sequences[request_id]
                case Close():
                    return

    def _prefill(self, message: Prefill) -> None:
        sequence = Sequence(message.request, message.slot, self.max_context)
        self.model.prefill(self.cache, message.slot, sequence.tokens[:-1])
        self.sequences[message.request.request_id] = SequenceSpeculation(
            sequence, self.options.lookahead, self.options.budget
        )

    # Answering: look the outcome up, draft just in time what is missing.

    def _answer(self, asked: List[Ask]) -> Speculations:
        start_ns = time.perf_counter_ns()
        states = [self.sequences[ask.request_id] for ask in asked]
        guessed = [len(state.cache) for state in states]
        for state, ask in zip(states, asked, strict=True):
            if ask.outcome is not None:
                self._resolve(state, ask.outcome)
        while growing := [state for state in states if not state.trunk.complete]:
            self._pass(growing, Role.BACKUP)
        items = [self._hand_over(*pair) for pair in zip(states, guessed, strict=True)]
        spans = [*self.speculating, Span(SpanKind.DRAFT, start_ns, time.perf_counter_ns())]
        self.speculating = []
        return Speculations(tuple(items), tuple(spans))

    def _resolve(self, state: SequenceSpeculation, outcome: Outcome) -> None:
        if self.options.fan_out == "adaptive":
            self._learn(state, outcome)
        slot = state.sequence.slot
        self.cache.truncate(slot, state.tree.trunk)
        self.cache.gather(slot, state.resolve(outcome))

    def _hand_over(self, state: SequenceSpeculation, guessed: int) -> Speculation:
        if state.trunk.q:
            rows = torch.stack(state.trunk.q)
            self.q_buffer[state.sequence.slot, : len(rows)] = rows
        return Speculation(
            request_id=state.sequence.request.request_id,
            tokens=tuple(state.drafted_tokens(state.trunk)),
            cache=state.after,
            backup="neural" if state.after is CacheOutcome.MISS else None,
            guesses=guessed,
        )

    # Speculating ahead: branches for the likely outcomes of what was handed over.

    def _open_caches(self, asked: List[Ask]) -> None:
        for ask in asked:
            state = self.sequences[ask.request_id]
            if state.sequence.draft_limit(1):  # else the next token is its last
                state.fan_out = self._fan_out(state)
                self._open_branches(state, first=0)

    def _open_branches(self, state: SequenceSpeculation, first: int) -> None:
        """Guesses outcomes at the trunk's positions from `first` on, as far as logits are known."""
        logits = state.trunk.logits[first:]
        if state.fan_out is None or not logits:
            return
        state.open_branches(
            guesses(
                torch.stack(logits),
                state.drafted_tokens(state.trunk),
                state.fan_out[first : first + len(logits)],
                ids=self.model.head_ids,
                first=first,
            )
        )

    def _unfinished(self) -> list[SequenceSpeculation]:
        states = self.sequences.values()
        return [state for state in states if state.fan_out is not None and not state.finished]

    def _speculate(self, states: List[SequenceSpeculation]) -> None:
        start_ns = time.perf_counter_ns()
        self._pass(states, Role.DRAFT)
        self.speculating.append(Span(SpanKind.SPECULATE, start_ns, time.perf_counter_ns()))

    # One forward pass over everything not fed yet.

    def _pass(self, states: List[SequenceSpeculation], role: Role) -> None:
        """Feeds every new node of these sequences; each incomplete path draws its next token."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for state in states:
            tree, first = state.tree, state.fed
            tokens += tree.tokens[first:]
            positions += tree.positions(first)
            start, count = tree.trunk + first, len(tree) - first
            segments.append(Segment(state.sequence.slot, start, count, tree.mask(first)))
        batch = TokenBatch.pack(tokens, positions, segments, self.model.device)
        logits = self.model.forward(batch, self.cache)
        counts = [segment.count for segment in segments]
        for state, rows in zip(states, torch.split(logits, counts), strict=True):
            self._grow(state, rows, role)

    def _grow(self, state: SequenceSpeculation, rows: torch.Tensor, role: Role) -> None:
        """Hands each path the logits [new nodes, Vd] of its last token; draws what is wanted."""
        first, state.fed = state.fed, len(state.tree)
        paths = [path for path in state.paths() if path.nodes[-1] >= first]
        for path in paths:
            path.logits.append(rows[path.nodes[-1] - first])
        if state.fan_out is not None and state.trunk in paths:  # its end: the bonus token
            self._open_branches(state, first=state.trunk.drafted)
        if growing := [path for path in paths if not path.complete]:
            self._draw(state, growing, role)

    def _draw(self, state: SequenceSpeculation, paths: List[Path], role: Role) -> None:
        sequence, params = state.sequence, state.sequence.request.sampling
        positions = [sequence.output_length + path.ahead + path.drafted for path in paths]
        uniforms = [sequence.stream.uniforms(role, at, 1).item() for at in positions]
        logits = torch.stack([path.logits[-1] for path in paths])
        try:
            tokens, q = draw(logits, params, uniforms, self.model.head_ids)
        except NonFiniteLogitsError as error:
            raise NonFiniteLogitsError(
                f"request {sequence.request.request_id}, output position {min(positions)}: "
                f"draft {error}"
            ) from error
        for i, (path, token) in enumerate(zip(paths, tokens, strict=True)):
            state.extend(path, token)
            if q is not None:
                path.q.append(q[i])

    # How many guesses at each position.

    def _fan_out(self, state: SequenceSpeculation) -> FanOut:
        options, lookahead = self.options, state.trunk.drafted
        match options.fan_out:
            case "uniform":
                return uniform(options.budget, lookahead)
            case "geometric":
                return geometric(options.budget, lookahead, options.acceptance, options.exponent)
            case "adaptive":
                return self.adaptive.allocate(state.after, options.budget, lookahead)

    def _learn(self, state: SequenceSpeculation, outcome: Outcome) -> None:
        if outcome.accepted < len(state.trunk.logits):
            rank = self._rank(state, outcome)
            self.adaptive.observe(state.after, outcome.accepted, state.trunk.drafted, rank)

    def _rank(self, state: SequenceSpeculation, outcome: Outcome) -> int | None:
        """1-based place of t* among what would have been guessed at its position."""
        row, drafted = state.trunk.logits[outcome.accepted], state.drafted_tokens(state.trunk)
        column = _column(self.model.head_ids, outcome.token, len(row))
        if column is None:
            return None
        above = int((row > row[column]).sum())
        if outcome.accepted < len(drafted):
            rejected = _column(self.model.head_ids, drafted[outcome.accepted], len(row))
            above -= int(rejected is not None and bool(row[rejected] > row[column]))
        return above + 1


def _column(ids: torch.Tensor | None, token: int, size: int) -> int | None:
    """Where a token's logit is; None when the head was trimmed of it."""
    if ids is None:
        return token if token < size else None
    column = int(torch.searchsorted(ids, token))
    return column if column < size and int(ids[column]) == token else None
