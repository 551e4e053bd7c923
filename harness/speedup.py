"""Speedup of one cell over another on the same prompts, and what it is made of.

A request's time is its share of the steps: each step's duration divided evenly among the sequences
that it advanced. The shares of a cell add up to the duration of its steps, so over all prompts a
speedup is the ratio of the two throughputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness import statistics
from harness.statistics import Estimate

if TYPE_CHECKING:
    import pandas as pd

    from harness.metrics import CellData

_REQUEST = ["prompt_index", "request_id"]
_COSTS = ["share_ns", "tokens", "rounds"]
_S = 1e9  # nanoseconds


@dataclass(frozen=True, slots=True)
class Speedup(Estimate):
    """A speedup with its interval and its two factors, which multiply to `value`.

    Attributes:
        geometric_mean: of the prompts' own speedups, each prompt counting alike.
        tokens_per_round: how many times as many tokens the method emits in a round.
        time_per_round: how many times as quick its rounds are; below 1 they are slower.
    """

    geometric_mean: float | None = None
    tokens_per_round: float | None = None
    time_per_round: float | None = None


def speedup(method: CellData, baseline: CellData) -> Speedup:
    """Speedup of a cell over a baseline's, over the requests that both finished.

    Repeats of a prompt are one observation: the interval is over prompts.
    """
    ours, theirs = common_costs(method, baseline)
    found = statistics.speedup(
        theirs["share_ns"], theirs["tokens"], ours["share_ns"], ours["tokens"]
    )
    value, low, high, n = found.value, found.low, found.high, found.n
    if n == 0:
        return Speedup(value, low, high, n)
    per_token = (theirs["share_ns"] / theirs["tokens"]) / (ours["share_ns"] / ours["tokens"])
    our, their = ours.sum(), theirs.sum()
    return Speedup(
        value,
        low,
        high,
        n,
        geometric_mean=statistics.geometric_mean(per_token),
        tokens_per_round=float(our["tokens"] / our["rounds"] / (their["tokens"] / their["rounds"])),
        time_per_round=float(
            their["share_ns"] / their["rounds"] / (our["share_ns"] / our["rounds"])
        ),
    )


def throughput(cells: Sequence[CellData]) -> Estimate:
    """Tokens per second of some cells together, with an interval over their prompts."""
    import pandas as pd

    if not cells:
        return Estimate(None, None, None, 0)
    costs = pd.concat([prompt_costs(data) for data in cells])
    return statistics.rate(costs["tokens"], costs["share_ns"] / _S)


def common_costs(method: CellData, baseline: CellData) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`prompt_costs` of both, over the requests that both finished: the same prompts in order."""
    ours, theirs = _request_costs(method), _request_costs(baseline)
    common = ours.index.intersection(theirs.index)
    return _by_prompt(ours.loc[common]), _by_prompt(theirs.loc[common])


def prompt_costs(data: CellData) -> pd.DataFrame:
    """`share_ns`, `tokens` and `rounds` of each prompt, its repeats added up; by prompt index."""
    return _by_prompt(_request_costs(data))


def _by_prompt(costs: pd.DataFrame) -> pd.DataFrame:
    return costs.groupby("prompt_index").sum()


def _request_costs(data: CellData) -> pd.DataFrame:
    key = ["item", "request_id"]
    shares = (data.rounds["end_ns"] - data.rounds["start_ns"]) / data.rounds["live"]
    total = data.rounds[key].assign(share_ns=shares, rounds=1).groupby(key).sum()
    rows = data.requests.rename(columns={"output_tokens": "tokens"}).join(total, on=key)
    return rows.set_index(_REQUEST)[_COSTS].sort_index()
