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
from impl.engine.device import upload
from impl.engine.language_model import LanguageModel
from impl.engine.randomness import RandomStream, Role
from impl.engine.sampling import Draft
from impl.engine.sequence import Sequence
from impl.engine.token_batch import TokenBatch
from impl.engine.truncation import truncated


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

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf, or nothing but -inf.
    """
    q = None
    if params.temperature == 0:
        columns = sampling.best_columns(logits)
        finite = sampling.largest(logits, columns).isfinite()
        likelihoods = logits.softmax(-1)
    else:
        likelihoods = sampling.softened(logits, params.temperature)
        finite = likelihoods[:, 0].isfinite()
        likelihoods = truncated(likelihoods, params)
        q = likelihoods if reweight is None else reweight(likelihoods)
        drawn_by = torch.tensor(uniforms, dtype=torch.float64)
        columns = sampling.sample(q, upload(drawn_by, q.device))
        columns.clamp_(max=q.shape[-1] - 1)  # of a row that is not finite: told below
    confidences = likelihoods.gather(-1, columns[:, None])[:, 0]
    tokens = columns if head_ids is None else head_ids[columns]
    read = torch.stack([tokens.double(), confidences.double(), finite.double()]).tolist()
    if 0 in read[2]:
        raise sampling.not_finite(read[2].index(0), len(read[2]))
    return Drawn([int(token) for token in read[0]], q, read[1])


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
        logits = self.model.forward(TokenBatch.causal(parts), self.cache, rows=last)
        for proposal in proposals:
            slot = proposal.sequence.slot
            self.cache.truncate(slot, lengths[slot] + len(proposal.feed))
        for params in dict.fromkeys(p.sequence.request.sampling for p in proposals):
            alike = [i for i, p in enumerate(proposals) if p.sequence.request.sampling == params]
            rows = logits if len(alike) == len(proposals) else logits[alike]
            self._draw([proposals[i] for i in alike], rows, params, stop_below)

    def _draw(
        self,
        proposals: List[Proposal],
        logits: torch.Tensor,
        params: SamplingParams,
        stop_below: float,
    ) -> None:
        """Appends a token to each; a proposal ends behind one that the draft was not sure of."""
        greedy = params.temperature == 0
        uniforms = (
            []
            if greedy
            else [
                draft_uniform(
                    p.sequence.stream,
                    p.sequence.output_length,
                    p.sequence.tokens[-1],
                    len(p.tokens),
                )
                for p in proposals
            ]
        )
        try:
            drawn = draw(logits, params, uniforms, self.model.head_ids)
        except NonFiniteLogitsError as error:
            bad = proposals[logits.amax(-1).isfinite().tolist().index(False)]
            name, position = bad.sequence.request.request_id, bad.sequence.output_length
            raise NonFiniteLogitsError(
                f"request {name}, output position {position + len(bad.tokens)}: draft {error}"
            ) from error
        for i, proposal in enumerate(proposals):
            proposal.tokens.append(drawn.tokens[i])
            proposal.feed = [drawn.tokens[i]]
            if drawn.q is not None:
                proposal.rows.append(drawn.q[i : i + 1])
            if stops(drawn.confidences[i], stop_below):
                proposal.count = len(proposal.tokens)
