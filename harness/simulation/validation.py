"""The simulator against stored runs: fed a run's traces and timings, does it give its speeds?

Each cell's steps are split in two halves. The timings of one half and all recorded rounds go in;
what comes out is compared with what the other half measured, and the same the other way round. So
no speed is told by its own clock. An emulated run needs no timings: it ran at a
profile's, which goes in instead.

Rounds of AMUSD and PEARL follow the clock, so only their text is taken from the trace: which tokens
the draft agreed on, and the usual block of PEARL. How many tokens a round has, and when the target
waits, is simulated. All other methods' rounds are replayed as they were; their time is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.simulation.emulation import CONTEXT, emulated_profile
from harness.simulation.profile import Profile
from harness.simulation.scenario import Method, Scenario
from harness.simulation.simulate import simulate
from harness.simulation.timings import steps_of, timings
from harness.simulation.traces import trace_of

if TYPE_CHECKING:
    import pandas as pd

# Whose schedule a method's rounds have. Trees and prompt lookup draft, then verify, as SD does.
REPLAYED: Mapping[str, Method] = {
    "ar": "ar", "sd": "sd", "tree": "sd", "ngram": "sd", "amusd": "amusd", "pearl": "pearl",
    "ssd": "ssd",
}  # fmt: skip
_S = 1e9  # nanoseconds
_BLOCK, _FED = 4, 8  # of pearl where no block was judged, of amusd where no option is known


@dataclass(frozen=True, slots=True)
class Replay:
    """A cell's speed, measured and simulated, tokens/s.

    Attributes:
        run, cell: which.
        rounds: measured, of all sequences.
        measured, simulated: of the whole cell.
        differences: simulated over measured less 1, of each part that was predicted by itself.
    """

    run: str
    cell: str
    rounds: int
    measured: float
    simulated: float
    differences: tuple[float, ...]

    @property
    def method(self) -> str:
        """The cell's, without its label or its control mark."""
        return method_of(self.cell)

    @property
    def error(self) -> float:
        """Mean of the absolute differences: what one half misses another does not make up for."""
        return fmean(map(abs, self.differences))


def validate(run: Path) -> list[Replay]:
    """Replays every cell of a run whose method is in `REPLAYED`.

    Raises:
        StoreError: no run directory.
    """
    from harness.store import read_run

    found = read_run(run)
    emulated = found.manifest.get("fingerprint", {}).get("emulated")
    profile = None if emulated is None else emulated_profile(emulated)
    decoders = found.manifest.get("decoders", {})
    replays = []
    for cell, rounds in _cells(found.rounds):
        options = decoders.get(cell, {}).get("options", {})
        if profile is not None:
            replays.append(against_profile(str(run), cell, rounds, profile, options))
        elif len(rounds.drop_duplicates(["item", "step"])) > 1:
            replays.append(replay(str(run), cell, rounds, options))
    return replays


def median_error(replays: Sequence[Replay]) -> float:
    """Over cells."""
    return median(replay.error for replay in replays)


def median_errors(replays: Sequence[Replay]) -> dict[str, float]:
    """Method -> median over its cells."""
    methods = dict.fromkeys(replay.method for replay in replays)
    return {name: median_error([r for r in replays if r.method == name]) for name in methods}


def _cells(rounds: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Cell name -> its rounds."""
    cells = rounds["item"].str.split("/").str[:-2].str.join("/")
    for cell, mine in rounds.groupby(cells):
        if method_of(str(cell)) in REPLAYED:
            yield str(cell), mine


def method_of(cell: str) -> str:
    """The method of a cell, its label and its control mark left out."""
    return cell.split("/")[0].split("@")[0].split(":")[0]


def replay(
    run: str, cell: str, rounds: pd.DataFrame, options: Mapping[str, Any] | None = None
) -> Replay:
    """One cell's speed from its rounds, each half of its steps timed by the other.

    All rounds are simulated by the timings of one half of the steps. What is left of that time
    without what this half really took is compared with what the other half took.

    Args:
        run: name of the run.
        cell: its id; begins with the method.
        rounds: the cell's rows of rounds.parquet, of two steps at least.
        options: of the cell's decoder.
    """
    half, differences, seconds = _halves(rounds), [], 0.0
    for mine, other in ((rounds[half], rounds[~half]), (rounds[~half], rounds[half])):
        told = _seconds(method_of(cell), rounds, other, options or {})
        seconds += told / 2
        differences.append(_duration(mine) / (told - _duration(other)) - 1)
    simulated = float(rounds["emitted"].sum()) / seconds
    return Replay(run, cell, len(rounds), _speed(rounds), simulated, tuple(differences))


def _halves(rounds: pd.DataFrame) -> pd.Series:
    """Whether a row's step is in the first half: as many steps in each, at random but always so.

    Alternate steps would be alike where a method's rounds take turns, as PEARL's do.
    """
    steps = rounds.groupby(["item", "step"], sort=True).ngroup()
    places = np.random.default_rng(0).permutation(int(steps.max()) + 1)
    return steps.map(lambda step: bool(places[step] % 2 == 0))


def _seconds(
    method: str, rounds: pd.DataFrame, timed: pd.DataFrame, options: Mapping[str, Any]
) -> float:
    """What the rounds take by the timings of some of them."""
    profile = timings(method, steps_of(method, timed))
    speed = _simulated(method, rounds, profile, options, _lookahead(method, timed, options))
    return float(rounds["emitted"].sum()) / speed


def _speed(rounds: pd.DataFrame) -> float:
    return float(rounds["emitted"].sum()) / _duration(rounds)


def _duration(rounds: pd.DataFrame) -> float:
    steps = rounds.drop_duplicates(["item", "step"])
    return float((steps["end_ns"] - steps["start_ns"]).sum()) / _S


def against_profile(
    run: str, cell: str, rounds: pd.DataFrame, profile: Profile, options: Mapping[str, Any]
) -> Replay:
    """One cell of an emulated run from its rounds and the profile that it ran at: no clock of its.

    Args:
        run: its name.
        cell: its id.
        rounds: as of `replay`, of any number of requests.
        profile: what passes were made to last.
        options: of the cell's decoder; `budget` says how wide a pass of SSD's build is.
    """
    method, measured = method_of(cell), _speed(rounds)
    told = _simulated(method, rounds, profile, options, _lookahead(method, rounds, options))
    return Replay(run, cell, len(rounds), measured, told, (told / measured - 1,))


def _simulated(
    method: str,
    recorded: pd.DataFrame,
    profile: Profile,
    options: Mapping[str, Any],
    lookahead: int | None,
) -> float:
    """Tokens/s of the recorded requests on a profile, item by item: slots empty at its end."""
    tokens = seconds = 0.0
    batch_size = int(recorded["live"].max())
    for _, item in recorded.groupby("item"):
        trace = replace(trace_of(item), as_recorded=lookahead is None)
        longest = max(1, int(trace.drafted.max()))
        budget = options.get("budget", 0)
        one = Scenario(
            REPLAYED[method],
            profile,
            trace,
            lookahead or longest,
            batch_size,
            budget=max(budget if isinstance(budget, int) else 0, longest + 1),
            fan_out="uniform",
            context=CONTEXT,
        )
        emitted = float(item["emitted"].sum())
        tokens += emitted
        seconds += emitted / simulate([one], rounds=None)[0].tokens_per_s
    return tokens / seconds


def _lookahead(method: str, rounds: pd.DataFrame, options: Mapping[str, Any]) -> int | None:
    """Tokens that are fed, or drafted as a block, at most; None where rounds are as recorded.

    PEARL's own choice follows its clock: it is the usual block of these rounds.
    """
    if method == "amusd":
        return int(options.get("max_verified", _FED))
    if method != "pearl":
        return None
    if isinstance(block := options.get("lookahead"), int):
        return block
    blocks = rounds["drafted"][rounds["drafted"] > 1]
    return int(blocks.median()) if len(blocks) else _BLOCK
