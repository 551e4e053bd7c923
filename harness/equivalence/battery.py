"""All tests of one group of tokens, and where in it a failed test shows most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.equivalence import martingale, pit
from harness.equivalence.hypothesis import TestOutcome
from harness.equivalence.strata import Stratum, strata

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

LEAST_TOKENS = 20  # of a stratum that is tested at all
SETS = {  # name of the test -> columns: whether the token is in the set, the set's mass under p
    "argmax": ("is_argmax", "argmax_p"),
    "end of sequence": ("is_end", "end_p"),
    "draft top 1": ("in_draft_top1", "draft_top1_p"),
    "draft top 3": ("in_draft_top3", "draft_top3_p"),
}


def run_tests(tokens: pd.DataFrame, *, exact_support: bool) -> list[TestOutcome]:
    """Every test that the tokens allow, not yet corrected for their number.

    Args:
        tokens: the token table of one method at one temperature and batch size, output after
            output, in order.
        exact_support: whether a probability of 0 means that the token was impossible. Not so when
            p is truncated by top-k or top-p and the reference's logits are only near the decoder's.
    """
    found = [
        outcome
        for stratum in strata(tokens)
        for outcome in _stratum_tests(tokens[stratum.mask], stratum)
    ]
    return [
        *found,
        *_order_tests(tokens),
        *([pit.rarest_token(_column(tokens, "p_tail"))] if exact_support else []),
    ]


def _order_tests(tokens: pd.DataFrame) -> Iterator[TestOutcome]:
    """Tests of the random numbers: by token id, and of neighbours in a text."""
    output = tokens["output"].to_numpy()
    if len(tokens) >= LEAST_TOKENS:
        yield pit.uniformity(_column(tokens, "u_by_id"), name="pit by id")
    for column, name in (("u", "pit serial"), ("u_by_id", "pit by id serial")):
        outcome = pit.serial_correlation(_column(tokens, column), output, name)
        if outcome:
            yield outcome


def _stratum_tests(tokens: pd.DataFrame, stratum: Stratum) -> Iterator[TestOutcome]:
    if len(tokens) < LEAST_TOKENS:
        return
    yield pit.uniformity(_column(tokens, "u"), stratum.name)
    for name, (member, mass) in SETS.items():
        if member in tokens:
            members = tokens[member].to_numpy(dtype=np.bool_)
            outcome = martingale.membership_test(name, stratum.name, members, _column(tokens, mass))
            if outcome:
                yield outcome
    moments = (_column(tokens, c) for c in ("log_p", "log_p_mean", "log_p_variance", "log_p_third"))
    outcome = martingale.log_probability_test(stratum.name, *moments)
    if outcome:
        yield outcome


def evidence(tokens: pd.DataFrame, outcome: TestOutcome) -> pd.Series[float]:
    """How much each token of the test's stratum adds to its statistic, in the failing direction."""
    mask = next(found.mask for found in strata(tokens) if found.name == outcome.stratum)
    own = tokens[mask]
    contribution = _CONTRIBUTIONS.get(outcome.test)
    if contribution is None:
        return own["p_tail"].clip(lower=np.finfo(np.float64).tiny).map(math.log).mul(-1)
    return contribution(own).mul(math.copysign(1, outcome.statistic))


def _set_contribution(member: str, mass: str) -> Callable[[pd.DataFrame], pd.Series[float]]:
    return lambda tokens: tokens[member] - tokens[mass]


_CONTRIBUTIONS: dict[str, Callable[[pd.DataFrame], pd.Series[float]]] = {
    **{name: _set_contribution(*columns) for name, columns in SETS.items()},
    "log p": lambda tokens: tokens["log_p"] - tokens["log_p_mean"],
}


def _column(tokens: pd.DataFrame, name: str) -> Floats:
    return tokens[name].to_numpy(dtype=np.float64)
