"""Miss rate against fan-out, and the power law that the fan-out is computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

LARGEST = 64  # guesses at one position; ranks beyond are censored there
_FEWEST = 20  # outcomes with a known rank, for a curve


def miss_rates(rounds: pd.DataFrame) -> pd.DataFrame:
    """How often F guesses would have missed the outcome, by temperature and cache state.

    The state is whether the draft that the outcome ended had come out of the speculation cache
    (`hit`) or from the backup (`miss`; a sequence's first draft too). Only outcomes that were
    emitted at a rank the run knows.

    Args:
        rounds: with `sequence`, `temperature`, `round`, `cache` and `rank`.

    Returns:
        A row for each temperature, state and F = 1, 2, ...: `miss_rate`, `fitted`, `exponent` and
        `outcomes`, the number behind it.
    """
    import pandas as pd

    ordered = rounds.sort_values(["sequence", "round"])
    after = ordered.groupby("sequence")["cache"].shift().fillna("miss")
    known = ordered.assign(after=after)
    known = known[known["cache"].notna() & known["rank"].notna()]
    tables = [
        _curve(own["rank"].to_numpy(np.float64)).assign(
            temperature=own["temperature"].iloc[0], after=own["after"].iloc[0]
        )
        for _, own in known.groupby(["temperature", "after"])
        if len(own) >= _FEWEST
    ]
    columns = ["temperature", "after", "fan_out", "miss_rate", "fitted", "exponent", "outcomes"]
    return pd.concat(tables)[columns] if tables else pd.DataFrame(columns=columns)


def fit_exponent(ranks: NDArray[np.float64]) -> float:
    """Exponent r of miss(F) = (1 + F)^-r by maximum likelihood; ranks above `LARGEST` are censored.

    P(rank = R) = R^-r - (1 + R)^-r, and P(rank > `LARGEST`) = (1 + `LARGEST`)^-r.
    """
    from scipy.optimize import minimize_scalar

    seen = ranks[ranks <= LARGEST]
    censored = len(ranks) - len(seen)

    def loss(r: float) -> float:
        chance = seen**-r - (1 + seen) ** -r
        return float(-np.log(chance).sum() + censored * r * np.log(1 + LARGEST))

    return float(minimize_scalar(loss, bounds=(1e-3, 20.0), method="bounded").x)


def _curve(ranks: NDArray[np.float64]) -> pd.DataFrame:
    import pandas as pd

    fan_out = np.arange(1, LARGEST + 1)
    missed = (ranks[None, :] > fan_out[:, None]).mean(1)
    exponent = fit_exponent(ranks)
    return pd.DataFrame(
        {
            "fan_out": fan_out,
            "miss_rate": missed,
            "fitted": (1.0 + fan_out) ** -exponent,
            "exponent": exponent,
            "outcomes": len(ranks),
        }
    )
