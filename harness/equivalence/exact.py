"""Verification, enumerated: what speculative rounds emit is distributed as the target, to 1e-9.

Each sequence that a case emits (`harness.equivalence.enumeration`) is continued by the target to a
common length, so that the comparison covers the joint distribution of an accepted prefix and
whatever follows it. There are no statistics here: an error is no matter of chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.decoder import SamplingParams
from harness.equivalence.exact_cases import Case, Row, SmallModel, Tokens, default_cases

if TYPE_CHECKING:
    from harness.equivalence.enumeration import Verify

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How far what a case emits is from the target.

    Attributes:
        name: the case.
        sequences: how many sequences were compared.
        error: largest difference of a sequence's probability.
        impossible: sequences emitted, however rarely, that the target never emits.
    """

    name: str
    sequences: int
    error: float
    impossible: int

    @property
    def exact(self) -> bool:
        """Within the tolerance, and nothing impossible."""
        return self.error < TOLERANCE and not self.impossible


@dataclass(frozen=True, slots=True)
class ExactCheck:
    """Every case enumerated; a part of the certificate."""

    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every case is exact."""
        return all(result.exact for result in self.results)

    @property
    def worst(self) -> CaseResult:
        """The case that speaks most against the verification."""
        return max(self.results, key=lambda result: (result.impossible > 0, result.error))


def exact_check(cases: Sequence[Case] | None = None, verify: Verify | None = None) -> ExactCheck:
    """Enumerates cases and compares each with its target.

    Args:
        cases: what to enumerate; `default_cases()` by default, which take a second or two.
        verify: the verification; the engine's by default.
    """
    cases = default_cases() if cases is None else cases
    return ExactCheck(tuple(check_case(case, verify) for case in cases))


def check_case(case: Case, verify: Verify | None = None) -> CaseResult:
    """Enumerates one case and compares it with its target, sequence by sequence."""
    from harness.equivalence.chain_enumeration import enumerate_chains
    from harness.equivalence.enumeration import enumerate_emissions

    law, vocab = _TargetLaw(case.target, case.params), case.target.vocab
    emitted = np.zeros(vocab**case.length)
    impossible, outside = 0, 0.0
    enumerate_case = enumerate_chains if case.chain else enumerate_emissions
    for tokens, weight in enumerate_case(case, verify).items():
        if not law.possible(tokens):
            impossible, outside = impossible + 1, outside + weight
            continue
        left = case.length - len(tokens)
        first = vocab**left * _rank(tokens, vocab)
        emitted[first : first + vocab**left] += weight * law.continuations(tokens, left)
    error = float(np.abs(emitted - law.continuations((), case.length)).max())
    return CaseResult(case.name, len(emitted), max(error, outside), impossible)


def _rank(tokens: Tokens, vocab: int) -> int:
    """The place of a sequence among all of its length, in order of ids."""
    rank = 0
    for token in tokens:
        rank = rank * vocab + token
    return rank


class _TargetLaw:
    """What the target itself emits, by definition: deliberately not the engine's code."""

    def __init__(self, target: SmallModel, params: SamplingParams) -> None:
        self._target, self._params = target, params
        self._ids = range(target.vocab)
        self._rows: dict[Tokens, Row] = {}

    def row(self, text: Tokens) -> Row:
        """The next token's distribution [vocab]."""
        if text not in self._rows:
            logits = self._target.logits(text)
            self._rows[text] = reference_distribution(logits, self._params)
        return self._rows[text]

    def possible(self, tokens: Tokens) -> bool:
        """Whether the target can emit these tokens at all."""
        return all(
            token in self._ids and self.row(tokens[:i])[token] > 0 for i, token in enumerate(tokens)
        )

    def continuations(self, text: Tokens, length: int) -> Row:
        """Probability of each continuation, [vocab ** length] in order of ids."""
        if length == 0:
            return np.ones(1)
        behind = np.stack([self.continuations((*text, token), length - 1) for token in self._ids])
        return np.multiply(self.row(text)[:, None], behind).ravel()


def reference_distribution(logits: Row, params: SamplingParams) -> Row:
    """Temperature, top-k and top-p by their definitions, one token at a time; float64 [V]."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept: Row = np.zeros(len(logits))
    if params.temperature == 0:
        kept[order[0]] = 1
        return kept
    weight = np.exp((logits - logits.max()) / params.temperature)
    order = order[: params.top_k or None]
    mass = 0.0
    for token in order:
        kept[token] = weight[token]
        mass += weight[token] / weight[order].sum()
        if mass >= params.top_p < 1:
            break
    kept /= kept.sum()
    return kept
