"""What SSD's speed formula predicts from a cell's own rounds, beside what was measured over them.

For any method that reports cache outcomes, whatever its name. The formulas are imported from
`impl.ssd.theory`, the one place that has them: plain arithmetic without a model, which SSD plans
with as well, so that what a run is checked against is what the method believed. Measured inputs go
in and the prediction comes out; nothing here knows a decoder.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.spans import waited_ns
from impl.ssd.theory import Backup, SpeedInputs, expected_tokens, predict

if TYPE_CHECKING:
    import pandas as pd

_STEP = ["item", "step"]
_MS = 1e6  # nanoseconds
_S = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted beside measured. Over the steps in which every sequence has a cache outcome.

    First rounds have none and are left out, with whatever was advanced beside them. A step in
    which any sequence missed is a miss: all wait for its backup.

    Attributes:
        steps: how many steps it is about.
        hit_rate: h, of one sequence.
        expected_hit_rate: the mean of what the method itself estimated, round by round.
        tokens_on_hit, tokens_on_miss: E_hit and E_miss, mean tokens that a sequence emitted.
        expected_on_hit, expected_on_miss: the same from the acceptance rate alone (1 + a + ... +
            a^K); more than was emitted where outputs were cut or acceptance falls with position.
        verify_ms: T_v, mean time of a verification, beside the working draft.
        build_time: T_p, what the speculations of a hit step took to build, what was completed
            while the target waited included, in verifications.
        backup_time: T_b, what was drafted on the critical path of a miss step, likewise.
        predicted_tokens_per_s: by the formula of DESIGN section 4, for all sequences together.
        measured_tokens_per_s: tokens over the duration of the same steps.
        efficiency: measured over predicted.
        wait_on_hit: how long the target was idle before the verification of a hit step: waiting,
            transfers and drafting, as a share of that verification.
    """

    steps: int
    hit_rate: float
    expected_hit_rate: float | None
    tokens_on_hit: float | None
    tokens_on_miss: float | None
    expected_on_hit: float | None
    expected_on_miss: float | None
    verify_ms: float
    build_time: float | None
    backup_time: float | None
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    efficiency: float
    wait_on_hit: float | None


def predict_cell(rounds: pd.DataFrame) -> Prediction | None:
    """Predicts the speed of a cell from its rounds.

    Args:
        rounds: the cell's rows of rounds.parquet.

    Returns:
        None without cache outcomes or without verify spans.
    """
    known = rounds["cache"].notna().groupby([rounds[name] for name in _STEP]).transform("all")
    rounds = rounds[known]
    if not rounds["verify_ns"].any():
        return None
    steps = _steps(rounds)
    hit, miss = rounds[rounds["cache"] == "hit"], rounds[rounds["cache"] == "miss"]
    verify_ns = float(steps["verify_ns"].mean())
    hits, stalls = steps[~steps["missed"]], steps[steps["missed"]]
    build_ns = _mean(hits["speculate_ns"] + hits["draft_ns"])
    backup_ns = _mean(stalls["draft_ns"])
    idle_ns = _mean(hits["draft_ns"] + hits["waited_ns"])
    inputs = SpeedInputs(
        hit_rate=len(hit) / len(rounds),
        tokens_on_hit=_mean(hit["emitted"]) or 0.0,
        build_time=(build_ns or 0.0) / verify_ns,
        backup=Backup(_mean(miss["emitted"]) or 0.0, (backup_ns or 0.0) / verify_ns),
    )
    predicted = _tokens_per_verification(inputs, steps["live"]) / (verify_ns / _S)
    measured = float(rounds["emitted"].sum() / (steps["duration_ns"].sum() / _S))
    return Prediction(
        steps=len(steps),
        hit_rate=inputs.hit_rate,
        expected_hit_rate=_mean(rounds["hit_chance"].dropna()),
        tokens_on_hit=_mean(hit["emitted"]),
        tokens_on_miss=_mean(miss["emitted"]),
        expected_on_hit=_expected(hit),
        expected_on_miss=_expected(miss),
        verify_ms=verify_ns / _MS,
        build_time=None if build_ns is None else build_ns / verify_ns,
        backup_time=None if backup_ns is None else backup_ns / verify_ns,
        predicted_tokens_per_s=predicted,
        measured_tokens_per_s=measured,
        efficiency=measured / predicted,
        wait_on_hit=None if idle_ns is None else idle_ns / float(hits["verify_ns"].mean()),
    )


def _steps(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row for each step: its duration, its shared spans, whether any sequence missed."""
    table = rounds.assign(
        duration_ns=rounds["end_ns"] - rounds["start_ns"],
        missed=rounds["cache"] == "miss",
        waited_ns=waited_ns(rounds),
    )
    spans = ["draft_ns", "verify_ns", "waited_ns", "speculate_ns"]
    return table.groupby(_STEP)[["live", "missed", "duration_ns", *spans]].max()


def _tokens_per_verification(inputs: SpeedInputs, live: pd.Series[int]) -> float:
    """Tokens of all sequences in the time of one verification, over steps of these sizes."""
    tokens = time = 0.0
    for size, count in Counter(live.tolist()).items():
        step = predict(replace(inputs, batch_size=size))
        tokens += count * size * step.tokens
        time += count * step.time
    return tokens / time


def _expected(rounds: pd.DataFrame) -> float | None:
    """Mean of 1 + a + ... + a^K over these rounds' K; a is pooled over their decisions."""
    drafted, accepted = rounds["drafted"], rounds["accepted"]
    decided = int((accepted + 1).clip(upper=drafted).sum())
    if not decided:
        return _mean(drafted + 1)  # nothing drafted: the target's own token
    rate = float(accepted.sum() / decided)
    return _mean(drafted.map(lambda lookahead: expected_tokens(rate, lookahead)))


def _mean(values: pd.Series[float]) -> float | None:
    return float(values.mean()) if len(values) else None
