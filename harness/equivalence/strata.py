"""The strata of the tests: some of the tokens, chosen by what was known before each was drawn.

A stratum must be known before its token is drawn, or exact decoding would fail in it. What is known
when token j of a round is about to be drawn: everything that happened in earlier rounds; whether
this round's speculation was a hit, since that follows from tokens already emitted; that tokens
0 .. j-1 of this round are out; and whether a draft of token j exists, since a drafter that stops
early decides so by the drafted tokens before it, which are out as well. That position j is reached
at all does depend on earlier acceptances, which is no harm: given that it is reached, its token
still follows p, because the acceptance of token j looks at random numbers of its own.

"How many tokens this round accepts" is not known then and is no stratum: among accepted tokens
those that the draft overlooks are missing, by that very fact. Nor is the exact number of drafted
tokens, which may say something of drafts still to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

LATE = 64  # output position from which a token counts as late


class Stratum(NamedTuple):
    """Some of the tokens of a table."""

    name: str
    mask: NDArray[np.bool_]


def strata(tokens: pd.DataFrame) -> Iterator[Stratum]:
    """All tokens, then every stratum that holds some of them but not all.

    Args:
        tokens: rows of the token table (`harness.equivalence.token_table`).
    """
    yield Stratum("all", np.ones(len(tokens), dtype=np.bool_))
    index, drafted = tokens["index"].to_numpy(), tokens["drafted"].to_numpy()
    candidates = [
        ("cache hit", tokens["cache"].eq("hit")),
        ("cache miss", tokens["cache"].eq("miss")),
        ("first of round", (index == 0) & (drafted > 0)),
        ("later in round", (index > 0) & (index < drafted)),
        ("bonus token", (index == drafted) & (drafted > 0)),
        ("first round", tokens["round"].eq(0)),
        ("after refill", tokens["refilled"]),
        (f"from token {LATE}", tokens["position"].ge(LATE)),
        *((name, tokens["dataset"].eq(name)) for name in sorted(tokens["dataset"].unique())),
    ]
    for name, chosen in candidates:
        mask = np.asarray(chosen, dtype=np.bool_)
        if mask.any() and not mask.all():
            yield Stratum(name, mask)
