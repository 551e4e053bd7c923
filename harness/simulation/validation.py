"""The simulator against stored runs: fed a run's traces and timings, does it give its speeds?

Each cell's requests are split in two halves. The timings of one half and the recorded rounds of the
other go in; what comes out is compared with what the other half measured. So no speed is told by
its own clock. An emulated run needs no timings: it ran at a profile's, which goes in instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from harness.simulation.acceptance import trace_of
from harness.simulation.emulation import CONTEXT, emulated_profile
from harness.simulation.profile import MeasuredPasses, Profile
from harness.simulation.scenario import METHODS, Method, Scenario
from harness.simulation.simulate import simulate
from impl.ssd.budgeting import PassTimes

if TYPE_CHECKING:
    import pandas as pd

_S = 1e9  # nanoseconds
_REPLAYED = ("ar", "sd", "ssd")
_NO_END = 10**12  # tokens: a trace is cut already


@dataclass(frozen=True, slots=True)
class Replay:
    """A cell's speed, measured and simulated, tokens/s.

    Attributes:
        run, cell: which.
        rounds: replayed.
    """

    run: str
    cell: str
    rounds: int
    measured: float
    simulated: float

    @property
    def difference(self) -> float:
        """Relative to the measured speed."""
        return self.simulated / self.measured - 1


def validate(run: Path) -> list[Replay]:
    """Replays the cells of a run of methods that can be replayed: ar, sd and ssd at batch size 1.

    Raises:
        StoreError: no run directory.
    """
    from harness.store import read_run

    found = read_run(run)
    emulated = found.manifest.get("fingerprint", {}).get("emulated")
    if emulated is None:
        return [replay(str(run), cell, rounds) for cell, rounds in _cells(found.rounds)]
    profile = emulated_profile(emulated)
    decoders = found.manifest["decoders"]
    return [
        against_profile(str(run), cell, rounds, profile, decoders[cell]["options"])
        for cell, rounds in _cells(found.rounds)
    ]


def median_error(replays: Sequence[Replay]) -> float:
    """Median of the absolute relative differences."""
    return median(abs(replay.difference) for replay in replays)


def _cells(rounds: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Cell name -> its rounds, where both halves have some."""
    parts = rounds["item"].str.split("/")
    cells = parts.str[:-2].str.join("/")
    for cell, mine in rounds.groupby(cells):
        method, single = method_of(str(cell)), mine["live"].max() == 1
        if method in _REPLAYED and single and mine["request_id"].nunique() > 1:
            yield str(cell), mine


def method_of(cell: str) -> Method | None:
    """The method of a cell, its label and its control mark left out; None for one not simulated."""
    name = cell.split("/")[0].split("@")[0].split(":")[0]
    return next((method for method in METHODS if method == name), None)


def replay(run: str, cell: str, rounds: pd.DataFrame) -> Replay:
    """One cell's speed from its rounds, each half of its requests timed by the other.

    Args:
        run: name of the run.
        cell: its id; begins with the method.
        rounds: the cell's rows of rounds.parquet, one sequence at a time, two requests at least.
    """
    order = {request: i for i, request in enumerate(sorted(rounds["request_id"].unique()))}
    half = rounds["request_id"].map(order) % 2
    tokens = simulated_s = 0.0
    for mine, other in (
        (rounds[half == 0], rounds[half == 1]),
        (rounds[half == 1], rounds[half == 0]),
    ):
        emitted = float(mine["emitted"].sum())
        tokens += emitted
        simulated_s += emitted / _simulated(cell, mine, timings(other))
    duration = float((rounds["end_ns"] - rounds["start_ns"]).sum()) / _S
    return Replay(run, cell, len(rounds), tokens / duration, tokens / simulated_s)


def against_profile(
    run: str, cell: str, rounds: pd.DataFrame, profile: Profile, options: Mapping[str, Any]
) -> Replay:
    """One cell of an emulated run from its rounds and the profile that it ran at: no clock of its.

    Args:
        run: its name.
        cell: its id.
        rounds: as of `replay`.
        profile: what passes were made to last.
        options: of the cell's decoder; its `budget` says how wide a pass of the build is.
    """
    budget = options.get("budget", 0)
    rows = budget if isinstance(budget, int) else 1  # auto: as many as are worth their time
    duration = float((rounds["end_ns"] - rounds["start_ns"]).sum()) / _S
    measured = float(rounds["emitted"].sum()) / duration
    return Replay(run, cell, len(rounds), measured, _simulated(cell, rounds, profile, rows))


def _simulated(cell: str, recorded: pd.DataFrame, profile: Profile, budget: int = 0) -> float:
    """Tokens/s of the recorded rounds on a profile."""
    method = method_of(cell)
    if method is None:
        raise ValueError(f"{cell}: no method that is simulated")
    told = recorded.assign(accepted=recorded["emitted"] - 1, rank=None)  # as cut; hits as they were
    trace = replace(trace_of(told), as_recorded=True)
    longest = max(1, int(trace.drafted.max()))
    one = Scenario(
        method, profile, trace, longest, budget=max(budget, longest + 1), fan_out="uniform",
        context=CONTEXT, output_tokens=_NO_END,
    )  # fmt: skip
    return simulate([one], rounds=len(recorded))[0].tokens_per_s


def timings(rounds: pd.DataFrame) -> Profile:
    """What passes cost in these rounds, one sequence each.

    A build that outlasts its verification shows as the wait of a hit, and is counted there; so
    building costs nothing else. A miss's wait and drafting are spread over its drafted tokens.
    """
    idle_ns = rounds["end_ns"] - rounds["start_ns"] - rounds["verify_ns"]
    hit = rounds["cache"] == "hit"
    waited = float(idle_ns[hit].mean()) if hit.any() else 0.0
    others = ~hit & (rounds["drafted"] > 0)
    drafted = max(1.0, float(rounds["drafted"][others].sum()))
    draft = max(1.0, float((idle_ns[others] - waited).sum()) / drafted)
    verify = _by_tokens(rounds)
    draft_pass = MeasuredPasses(PassTimes((1,), (draft / _S,)))
    nothing = MeasuredPasses(PassTimes((1,), (0.0,)))
    return Profile(
        "run", "measured", 1, 1, verify, verify, draft_pass, nothing, transfer_s=waited / _S
    )


def _by_tokens(rounds: pd.DataFrame) -> MeasuredPasses:
    """Mean time of a verification by the tokens fed, as the nearest ascending function.

    A size that was seen once or twice must not lift all larger ones.
    """
    from scipy.optimize import isotonic_regression

    found = rounds.groupby(rounds["drafted"] + 1)["verify_ns"].agg(["mean", "size"])
    seconds = isotonic_regression(found["mean"], weights=found["size"]).x / _S
    sizes = found.index.to_numpy()
    return MeasuredPasses(PassTimes(tuple(sizes.tolist()), tuple(seconds.tolist())))
