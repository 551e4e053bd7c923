"""Drafting on the target's own device: the draft model proposes tokens one after the other."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from harness.decoder import SamplingParams
from harness.errors import NonFiniteLogitsError
from impl.engine import sampling
from impl.engine.language_model import LanguageModel
from impl.engine.randomness import RandomStream, Role
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence
from impl.engine.token_batch import TokenBatch


def draft_uniform(stream: RandomStream, start: int, after: int, index: int) -> float:
    """The number that draws a speculation's token `index` (from 0).

    A speculation has a stream of its own, named by the output position of its first token and by
    the token before it. So its draws say nothing about those of an earlier round, nor about those
    of a branch that begins at the same position behind another token, and both may decide what is
    speculated ahead, and how far, without bias. It also makes a speculation the same whether it was
    drafted ahead or just in time.
    """
    return float(stream.uniforms(Role.DRAFT, start, index + 1, after)[index])


def stops(confidence: float, stop_below: float) -> bool:
    """Whether a draft ends with the token just drawn, because the draft was not sure of it.

    The token itself is still submitted. So whether token i + 1 is submitted depends on tokens 1 to
    i alone: given that it is, it was drawn from its q_{i+1}, which is all that the verification
    needs. Leaving token i out when its own probability is low would be biased at temperature > 0:
    the tokens that remain would follow q_i restricted to likely ones, and be judged as if drawn
    from q_i. (A greedy draft is a function of the text, so there it would only cost a token.)

    Args:
        confidence: the draft's probability of the token.
        stop_below: the threshold; 0 never stops.
    """
    return confidence < stop_below


class Drawn(NamedTuple):
    """Tokens drawn from n rows of draft logits.

    Attributes:
        tokens: target ids.
        q: the distributions [n, Vd] they were drawn from; None when greedy (point masses).
        confidences: the draft's probability of each token.
    """

    tokens: list[int]
    q: torch.Tensor | None
    confidences: list[float]


def draw(
    logits: torch.Tensor,
    params: SamplingParams,
    uniforms: List[float],
    head_ids: torch.Tensor | None,
    reweight: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Drawn:
    """One token from each row.

    Args:
        logits: [n, Vd].
        params: how to draw.
        uniforms: n numbers in [0, 1); unused when greedy.
        head_ids: target ids of the Vd columns; None when they are the same.
        reweight: changes q before anything is drawn from it.
    """
    if params.temperature == 0:
        columns, q = sampling.argmax(logits), None
        likelihoods = logits.softmax(-1)
    else:
        likelihoods = sampling.probabilities(logits, params)
        q = likelihoods if reweight is None else reweight(likelihoods)
        columns = sampling.sample(q, torch.tensor(uniforms, dtype=torch.float64, device=q.device))
    confidences = likelihoods.gather(-1, columns[:, None])[:, 0].tolist()
    tokens = columns if head_ids is None else head_ids[columns]
    return Drawn(tokens.tolist(), q, confidences)


@dataclass(slots=True)
class Proposal:
    """A draft in the making: tokens so far, their q rows, and what to feed next.

    `count` is how many tokens are wanted; less once the draft has stopped early.
    """

    sequence: Sequence
    count: int
    feed: list[int]
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)

    def as_draft(self, ids: torch.Tensor | None) -> Draft:
        probs = torch.cat(self.rows) if self.rows else None
        return Draft(torch.tensor(self.tokens, dtype=torch.int64), probs, ids)


class Drafter:
    """The draft model with its own cache, in step with the sequences of a decoder."""

    def __init__(self, model: LanguageModel, slots: int, cells: int) -> None:
        self.model = model
        self.cache = model.new_cache(slots, cells)

    def prefill(self, sequence: Sequence) -> None:
        """Caches all of the prompt but the pending token."""
        self.model.prefill(self.cache, sequence.slot, sequence.tokens[:-1])

    def propose(
        self, sequences: List[Sequence], lookahead: int, stop_below: float = 0.0
    ) -> list[Draft]:
        """Up to `lookahead` tokens for each sequence, all sequences in one batch.

        A sequence's draft ends early behind a token less likely than `stop_below` (see `stops`).
        """
        proposals = [self.begin(sequence, lookahead) for sequence in sequences]
        for _ in range(lookahead):
            active = [p for p in proposals if len(p.tokens) < p.count]
            if not active:
                break
            self.extend(active, stop_below)
        return [proposal.as_draft(self.model.head_ids) for proposal in proposals]

    def begin(self, sequence: Sequence, lookahead: int) -> Proposal:
        """An empty proposal behind the sequence's text, of at most `lookahead` tokens."""
        slot, tokens = sequence.slot, sequence.tokens
        settled = min(self.cache.lengths[slot], len(tokens) - 1)  # drops rejected tokens
        self.cache.truncate(slot, settled)
        return Proposal(sequence, sequence.draft_limit(lookahead), tokens[settled:])

    def extend(self, proposals: List[Proposal], stop_below: float = 0.0) -> None:
        """Feeds what each proposal has not cached yet and draws its next token."""
        lengths = self.cache.lengths
        parts = [(p.sequence.slot, lengths[p.sequence.slot], p.feed) for p in proposals]
        last = torch.tensor([len(p.feed) for p in proposals]).cumsum(0) - 1
        batch = TokenBatch.causal(parts, self.model.device)
        logits = self.model.forward(batch, self.cache, rows=last)
        for proposal, row in zip(proposals, torch.split(logits, 1), strict=True):
            slot = proposal.sequence.slot
            self.cache.truncate(slot, lengths[slot] + len(proposal.feed))
            if stops(self._draw(proposal, row), stop_below):
                proposal.count = len(proposal.tokens)

    def _draw(self, proposal: Proposal, logits: torch.Tensor) -> float:
        """Appends a token; returns the draft's probability of it."""
        sequence = proposal.sequence
        index, params = len(proposal.tokens), sequence.request.sampling
        place = (sequence.output_length, sequence.tokens[-1], index)
        greedy = params.temperature == 0
        uniforms = [] if greedy else [draft_uniform(sequence.stream, *place)]
        try:
            drawn = draw(logits, params, uniforms, self.model.head_ids)
        except NonFiniteLogitsError as error:
            name = sequence.request.request_id
            raise NonFiniteLogitsError(
                f"request {name}, output position {sequence.output_length + index}: draft {error}"
            ) from error
        proposal.tokens += drawn.tokens
        proposal.feed = drawn.tokens
        if drawn.q is not None:
            proposal.rows.append(drawn.q)
        return drawn.confidences[0]
