"""What passes cost in recorded rounds, as a profile that the simulator takes.

A step of a run advances all live sequences; its time is what the harness's clock saw, its parts are
the spans that the decoder told of (docs/run-directory.md). Each kind of part is fitted by what it
depends on: a verification by the tokens that it is over, a draft pass by the sequences drafted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.simulation.profile import MeasuredPasses, Profile
from harness.spans import waited_ns
from impl.ssd.budgeting import PassTimes

if TYPE_CHECKING:
    import pandas as pd

_S = 1e9  # nanoseconds
_CHAINS = ("amusd", "pearl")  # whose drafting is beside the verification alone


def timings(method: str, steps: pd.DataFrame) -> Profile:
    """What passes cost in these steps.

    A build of SSD that outlasts its verification shows as the wait of a hit and is counted there,
    as a transfer, so building costs nothing else. The rest of a step that is no verification is
    spread over the draft passes that the target waited for.

    Args:
        method: whose steps.
        steps: of `steps_of`.
    """
    verify = _fitted(steps["tokens"], steps["verify_s"])
    nothing = MeasuredPasses(PassTimes((1,), (0.0,)))
    if method in _CHAINS:
        draft, alone = _chain_passes(steps)
        return Profile("run", "measured", 1, 1, verify, verify, alone, draft, transfer_s=0.0)
    waits = steps[steps["awaited"] > 0]
    others = steps[steps["awaited"] == 0]
    transfer = float(others["idle_s"].mean()) if method == "ssd" and len(others) else 0.0
    passes = waits["drafted"]
    drafting = (waits["idle_s"] - transfer).clip(lower=0.0)
    draft = _fitted(waits["awaited"], drafting / passes, passes) if len(waits) else nothing
    return Profile("run", "measured", 1, 1, verify, verify, draft, nothing, transfer_s=transfer)


def steps_of(method: str, rounds: pd.DataFrame) -> pd.DataFrame:
    """A row for each step of these rows of rounds.parquet.

    Columns: `item`, `step`; `tokens` of the target's pass; `live` sequences; `awaited`: sequences
    whose draft the target waited for, and `drafted`: the longest such draft; `emitted`; `seconds`;
    `verify_s`; `idle_s`: the rest; `wait_s`: of that, what the draft was waited for, messages on
    their way included; `begins`: a request's first round is among them; `passes`: told of by a
    draft that works beside the target, and `pass_s`: their mean.
    """
    table = rounds.assign(
        fed=_fed(method, rounds),
        waited=_waited(method, rounds),
        seconds=(rounds["end_ns"] - rounds["start_ns"]) / _S,
        verify_s=rounds["verify_ns"] / _S,
        passes=[sum(span["kind"] == "speculate" for span in spans) for spans in rounds["spans"]],
        speculate_s=rounds["speculate_ns"] / _S,
        wait_s=waited_ns(rounds) / _S,
        begins=rounds["round"] == 0,
    )
    table["longest"] = table["drafted"] * table["waited"]
    steps = table.groupby(["item", "step"], sort=True).agg(
        tokens=("fed", "sum"),
        live=("fed", "size"),
        awaited=("waited", "sum"),
        drafted=("longest", "max"),
        emitted=("emitted", "sum"),
        seconds=("seconds", "first"),
        verify_s=("verify_s", "first"),
        passes=("passes", "first"),
        speculate_s=("speculate_s", "first"),
        wait_s=("wait_s", "first"),
        begins=("begins", "any"),
    )
    steps["idle_s"] = steps["seconds"] - steps["verify_s"]
    steps["pass_s"] = steps["speculate_s"] / steps["passes"].clip(lower=1)
    return steps.reset_index()


def _chain_passes(steps: pd.DataFrame) -> tuple[MeasuredPasses, MeasuredPasses]:
    """Draft passes beside a verification, and those that the target waits for.

    A wait is for one pass where a request begins and for one and a half on average behind a
    correction (`schedules.Amusd`); shorter ones are for messages.
    """
    told = steps[steps["passes"] > 0]
    if not len(told):
        nothing = MeasuredPasses(PassTimes((1,), (0.0,)))
        return nothing, nothing
    beside = _fitted(told["live"], told["pass_s"], told["passes"])
    waits = steps[steps["wait_s"] > 0.3 * told["pass_s"].mean()]
    if not len(waits):
        return beside, beside
    passes = 1.5 - 0.5 * waits["begins"]
    return beside, _fitted(waits["live"], waits["wait_s"] / passes, passes)


def _fed(method: str, rounds: pd.DataFrame) -> pd.Series:
    """Tokens of each sequence in the target's pass.

    The last token of the text is one of them; the chains' last judged token is not, because it is
    drafted while the pass runs.
    """
    drafted: pd.Series = rounds["drafted"]
    return drafted.clip(lower=1) if method in _CHAINS else drafted + 1


def _waited(method: str, rounds: pd.DataFrame) -> pd.Series:
    waited: pd.Series = rounds["drafted"] > 0
    if method == "ssd":
        waited &= (rounds["cache"] != "hit") & (rounds["backup"] != "fast")
    return waited


def _fitted(
    sizes: pd.Series, seconds: pd.Series, weights: pd.Series | None = None
) -> MeasuredPasses:
    """Mean seconds by size, as the nearest ascending function.

    A size that was seen once or twice must not lift all larger ones.
    """
    import pandas as pd
    from scipy.optimize import isotonic_regression

    told = pd.DataFrame({"size": sizes, "seconds": seconds, "weight": 1.0})
    if weights is not None:
        told["weight"] = weights
    told["sum"] = told["seconds"] * told["weight"]
    found = told.groupby("size")[["sum", "weight"]].sum()
    means = isotonic_regression(found["sum"] / found["weight"], weights=found["weight"]).x
    return MeasuredPasses(PassTimes(tuple(found.index.tolist()), tuple(means.tolist())))
