"""Why a cell's speed changed between two runs: acceptance, hit rate or step time.

The rounds of a cell fall into three groups: hits, misses, and those without a cache outcome. With
w the groups' shares of the rounds, e their tokens a round and t their time a round,

    speed = sum_g(w_g e_g) / sum_g(w_g t_g)

A change of speed is spread over the three factors e (acceptance), w (hit rate) and t (step time)
by their Shapley values on log speed: each factor's effect, averaged over all orders in which the
three can change. The factors' ratios multiply to the ratio of the speeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

from harness.spans import waited_ns

if TYPE_CHECKING:
    import pandas as pd

    from harness.metrics import CellData

_SPANS = ("verify", "draft", "wait")


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times as fast each factor alone made the newer run; below 1 it slowed it down.

    Attributes:
        acceptance: tokens a round among hits, among misses and among other rounds.
        hit_rate: which share of the rounds were hits.
        step_time: time a round among each of them.
        span: where the mean step's time changed most: `verify`, `draft`, `wait` (with transfers,
            which older runs do not tell apart) or `other`; None where a decoder reports no spans.
        span_ms: by how much, in milliseconds a step.
    """

    acceptance: float
    hit_rate: float
    step_time: float
    span: str | None = None
    span_ms: float | None = None

    @property
    def slowest(self) -> str:
        """The factor that slowed the newer run down most."""
        ratios = {
            "acceptance": self.acceptance,
            "hit rate": self.hit_rate,
            "step time": self.step_time,
        }
        return min(ratios, key=lambda name: ratios[name])

    @property
    def blame(self) -> str:
        """The slowest factor in words, with the span at fault for step time."""
        if self.slowest != "step time" or self.span is None or self.span_ms is None:
            return self.slowest
        return f"step time ({self.span} {self.span_ms:+.3g} ms)"


@dataclass(frozen=True, slots=True)
class _Group:
    """Rounds with one cache outcome: their share, tokens a round and time a round."""

    share: float
    tokens: float
    time: float


def factors(base: CellData, new: CellData) -> Factors | None:
    """The change from `base` to `new`, over the requests in both; None where there are none."""
    base_rounds, new_rounds = _common(base, new), _common(new, base)
    if base_rounds.empty or new_rounds.empty:
        return None
    before, after = _groups(base_rounds), _groups(new_rounds)
    for name in before.keys() ^ after.keys():  # a group that one run lacks has the other's figures
        present = before.get(name) or after[name]
        absent = _Group(0.0, present.tokens, present.time)
        before.setdefault(name, absent)
        after.setdefault(name, absent)
    tokens = _shapley(before, after, "tokens")
    time = _shapley(before, after, "time")
    span, span_ms = _span(base_rounds, new_rounds)
    return Factors(
        acceptance=exp(tokens.values),
        hit_rate=exp(tokens.shares - time.shares),
        step_time=exp(-time.values),
        span=span,
        span_ms=span_ms,
    )


@dataclass(frozen=True, slots=True)
class _Effects:
    """Of a change in the shares and in the values on the log of their weighted mean."""

    shares: float
    values: float


def _shapley(before: dict[str, _Group], after: dict[str, _Group], field: str) -> _Effects:
    def mean(shares: dict[str, _Group], values: dict[str, _Group]) -> float:
        return log(sum(shares[name].share * getattr(values[name], field) for name in shares))

    old, new = mean(before, before), mean(after, after)
    only_shares, only_values = mean(after, before), mean(before, after)
    return _Effects(
        shares=(only_shares - old + new - only_values) / 2,
        values=(only_values - old + new - only_shares) / 2,
    )


def _common(data: CellData, other: CellData) -> pd.DataFrame:
    """The rounds of the requests that both have; all rounds where they share none."""
    common = data.rounds[data.rounds["request_id"].isin(other.requests["request_id"])]
    return data.rounds if common.empty else common


def _groups(rounds: pd.DataFrame) -> dict[str, _Group]:
    time = (rounds["end_ns"] - rounds["start_ns"]) / rounds["live"]
    table = rounds.assign(time=time, outcome=rounds["cache"].fillna("none"))
    return {
        str(outcome): _Group(
            len(own) / len(table), float(own["emitted"].mean()), float(own["time"].mean())
        )
        for outcome, own in table.groupby("outcome")
    }


def _span(base: pd.DataFrame, new: pd.DataFrame) -> tuple[str | None, float | None]:
    before, after = _mean_spans(base), _mean_spans(new)
    if not any(before[name] or after[name] for name in _SPANS):
        return None, None
    changes = {name: after[name] - before[name] for name in before}
    span = max(changes, key=lambda name: abs(changes[name]))
    return span, changes[span]


def _mean_spans(rounds: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of the mean step in each span of the critical path, and outside all of them."""
    steps = rounds.drop_duplicates(["item", "step"])
    steps = steps.assign(wait_ns=waited_ns(steps))
    told = {name: float(steps[f"{name}_ns"].mean() / 1e6) for name in _SPANS}
    wall = float((steps["end_ns"] - steps["start_ns"]).mean() / 1e6)
    return {**told, "other": wall - sum(told.values())}
