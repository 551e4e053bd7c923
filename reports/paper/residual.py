"""Where the residual's mass lies, before and after Saguaro sampling, from the stored rounds.

The token emitted at a rejection is drawn from the residual norm(max(p - q, 0)), q being the
distribution that the draft really used. So the share of these tokens that are among the F likeliest
of the draft estimates the mass of the residual there: of q itself at C = 1, of the reweighted one
below (arXiv 2603.03251, Saguaro sampling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 16  # F
_FEWEST = 20  # rejections, for a curve
_SEQUENCE = ["item", "request_id"]


def residual_mass(rounds: pd.DataFrame) -> pd.DataFrame:
    """The residual's mass on the draft's F likeliest tokens other than the rejected one.

    Left out: outcomes whose rank the run does not know, and drafts of the fast backup, whose q is a
    point mass that Saguaro sampling does not touch.

    Args:
        rounds: rows of rounds.parquet, of cells with one value of C.

    Returns:
        A row for each F = 1, 2, ...: `fan_out`, `mass` and `rejections`, the number behind it;
        empty with fewer than 20.
    """
    import pandas as pd

    ordered = rounds.sort_values([*_SEQUENCE, "round"])
    before = ordered.groupby(_SEQUENCE)[["accepted", "drafted", "backup"]].shift()
    rejected = (before["accepted"] < before["drafted"]) & (before["backup"] != "fast")
    ranks = ordered.loc[rejected & ordered["rank"].notna(), "rank"].to_numpy(np.float64)
    fan_out = np.arange(1, LARGEST + 1)
    if len(ranks) < _FEWEST:
        return pd.DataFrame(columns=["fan_out", "mass", "rejections"])
    mass = (ranks[None, :] <= fan_out[:, None]).mean(1)
    return pd.DataFrame({"fan_out": fan_out, "mass": mass, "rejections": len(ranks)})
