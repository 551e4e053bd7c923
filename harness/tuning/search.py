"""The search: successive halving over a method's grid, each rung a run of its own.

Every candidate of a rung decodes the same tuning prompts for the same number of rounds, in turns
with the other candidates of its method; the fastest third goes on, and so on until one is left. All
rungs of a method get equal shares of its rounds, so the fewer candidates are left, the longer each
is measured. What a rung could not spend, because outputs ended early, the next one has.

Every method gets the same number of rounds, however many candidates it has. Only decoding is
compared, never a prefill, so warm-up prompts are cut short: candidates are many, prompts are long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import synthetic
from harness.config import RunConfig
from harness.decoder_pool import Method
from harness.errors import HarnessError, UsageError
from harness.metrics import split_cells
from harness.preparation import resolve_methods
from harness.progress import Progress
from harness.prompts import PromptSet
from harness.run_prompts import prompt_sets
from harness.runner import run
from harness.speedup import throughput
from harness.tuning.choices import Candidate, Choice, Setting

if TYPE_CHECKING:
    from harness.store import RunData

KEPT_ONE_IN = 3
_ROUNDS_A_PROMPT = 16  # at least, where there are enough rounds: the first rounds are unlike others
_MOST_ROUNDS_A_PROMPT = 32  # beyond this a prompt is decoded again instead
_FEWEST_ROUNDS = 8  # of a full batch, below which a candidate's speed says little
_WARM_UP_TOKENS = 32  # of a prompt

Options = Mapping[str, Any]


class Rung(NamedTuple):
    """How a rung spends its rounds: `prompts * repeats * rounds_a_prompt` for each candidate."""

    prompts: int
    repeats: int
    rounds_a_prompt: int


@dataclass(frozen=True, slots=True)
class Search:
    """What to search for.

    Attributes:
        method: registered name.
        options: given ones; not searched.
        temperature, batch_size: the setting.
        budget: rounds to spend.
    """

    method: str
    options: Options
    temperature: float
    batch_size: int
    budget: int

    def __str__(self) -> str:
        return f"{self.method} ({Setting(self.temperature > 0, self.batch_size)})"


def tune(
    config: RunConfig, budget: int, out: Path, progress: Callable[[], Progress]
) -> Iterator[Choice]:
    """Tunes every method of a config that declares a grid, for each temperature and batch size.

    Args:
        config: methods, pair, datasets (their tuning split is used), lengths, placement.
        budget: rounds for each method and setting.
        out: folder for the run directories of the rungs; absent or empty.
        progress: makes what one run reports to.

    Returns:
        The choices, each as soon as it is made: what ends a search takes none of those before it.

    Raises:
        UsageError: before anything is measured, as `harness.runner.run`; emulated devices or a
            synthetic acceptance; no method has anything to tune, or too few rounds.
        HarnessError: as `harness.runner.run`; or every candidate of a method failed.
        KeyboardInterrupt: interrupted; the runs made so far stay.
    """
    if config.devices:
        raise UsageError("devices: choices are for a real machine; drop --devices")
    synthetic.refuse(config, "choices are for a real pair")
    found = resolve_methods(config)
    tunable = {name: method for name, method in found.items() if method.grid and ":" not in name}
    if not tunable:
        raise UsageError(f"methods: none of {', '.join(found)} has anything to tune")
    settings = product(tunable, config.temperatures, config.batch_sizes)
    searches = [
        Search(name, config.options.get(name, {}), temperature, batch_size, budget)
        for name, temperature, batch_size in settings
    ]
    points = {name: candidates(method) for name, method in tunable.items()}
    for search in searches:
        _refuse_small_budget(search, len(points[search.method]), len(config.datasets))
    for search in searches:
        if warning := thin_evidence(search, len(points[search.method])):
            progress().note(f"warning: {warning}")
    sets = prompt_sets(config.model_copy(update={"split": "tuning"}))
    return (
        _Searching(config, search, out, progress, sets).choose(points[search.method])
        for search in searches
    )


def candidates(method: Method) -> list[dict[str, Any]]:
    """Every combination of values for the grid's options that are not given; the defaults first."""
    grid = {key: values for key, values in method.grid.items() if key not in method.given}
    defaults = {key: getattr(method.options, key) for key in grid}
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [defaults, *(point for point in points if point != defaults)]


def rungs(count: int) -> list[int]:
    """Candidates of each rung, from `count` down to the last rung, which leaves one."""
    sizes = [count]
    while (kept := _kept(sizes[-1])) > 1:
        sizes.append(kept)
    return sizes


def plan_rung(rounds: int, prompts: int, batch_size: int) -> Rung:
    """How a candidate spends `rounds` rounds on at most `prompts` prompts.

    Fills the batch twice where there are prompts for it, and takes at least two prompts, so that
    there is an interval over them.
    """
    used = min(prompts, rounds, max(2 * batch_size, rounds // _ROUNDS_A_PROMPT))
    repeats = ceil(rounds / (used * _MOST_ROUNDS_A_PROMPT))
    return Rung(used, repeats, rounds // (used * repeats))


def thin_evidence(search: Search, count: int) -> str | None:
    """What to say where the first rung has too few rounds to rank `count` candidates by."""
    rung_count = len(rungs(count))
    enough = _FEWEST_ROUNDS * search.batch_size * count * rung_count
    if search.budget >= enough:
        return None
    return (
        f"{search}: {count} candidates share {search.budget // rung_count} rounds in the first "
        f"rung, fewer than {_FEWEST_ROUNDS} of a full batch each, which rank little; give "
        f"--rounds {enough}, or fewer candidates with --set"
    )


def _kept(count: int) -> int:
    return ceil(count / KEPT_ONE_IN)


def _refuse_small_budget(search: Search, count: int, datasets: int) -> None:
    sizes = rungs(count)
    needed = count * len(sizes) * datasets  # a round for each candidate of the first rung
    if search.budget < needed:
        raise UsageError(
            f"rounds: {search.method} has {count} candidates in {len(sizes)} rungs, which takes "
            f"at least {needed} rounds, not {search.budget}"
        )


class _Searching:
    """One search under way."""

    def __init__(
        self,
        config: RunConfig,
        search: Search,
        out: Path,
        progress: Callable[[], Progress],
        sets: Mapping[str, PromptSet],
    ) -> None:
        self.config, self.search, self.progress, self.sets = config, search, progress, sets
        kind = f"t{search.temperature:g}-b{search.batch_size}"
        self.folder = out / f"{search.method}-{kind}"
        self.evidence: list[Candidate] = []
        self.runs: list[RunData] = []
        self.prompts = 0  # of each dataset, that any rung measured on

    def choose(self, points: Sequence[Options]) -> Choice:
        """Goes through the rungs."""
        sizes = rungs(len(points))
        left = self.search.budget
        for rung in range(len(sizes)):
            measured = self._rung(rung, points, left // (len(sizes) - rung))
            self.evidence += measured
            left -= sum(candidate.rounds for candidate in measured)
            points = [candidate.options for candidate in measured if candidate.kept]
        return self._choice(points[0], self.search.budget - left)

    def _rung(self, rung: int, points: Sequence[Options], rounds: int) -> list[Candidate]:
        """Measures the candidates, marks those that go on; the fastest come first."""
        directory = self.folder / f"rung-{rung}"
        each = rounds // (len(points) * len(self.sets))
        available = min(len(found.prompts) for found in self.sets.values())
        plan = plan_rung(each, available, self.search.batch_size)
        self.prompts = max(self.prompts, plan.prompts)
        config = self._run_config(points, plan)
        summary = run(config, directory, self.progress())
        if summary.status == "interrupted":
            raise KeyboardInterrupt
        data = self._read(directory)
        measured = [
            _measured(data, rung, name, point)
            for name, point in zip(config.methods, points, strict=True)
        ]
        return _ranked(measured, self.search.method)

    def _read(self, directory: Path) -> RunData:
        from harness.store import read_run

        self.runs.append(data := read_run(directory))
        return data

    def _run_config(self, points: Sequence[Options], plan: Rung) -> RunConfig:
        search = self.search
        variants = {f"{search.method}:{i}": {**search.options, **p} for i, p in enumerate(points)}
        changes = {
            "methods": tuple(variants),
            "options": variants,
            "split": "tuning",
            "tuned": False,
            "prompts": plan.prompts,
            "repeats": plan.repeats,
            "max_rounds": plan.rounds_a_prompt,
            "block_size": 1,
            "warmup_prompt_tokens": _WARM_UP_TOKENS,
            "temperatures": (search.temperature,),
            "batch_sizes": (search.batch_size,),
            "control": False,
            "verify": False,
        }
        return RunConfig.model_validate({**self.config.model_dump(exclude_unset=True), **changes})

    def _choice(self, winner: Options, rounds: int) -> Choice:
        search, first = self.search, self.runs[0].manifest
        return Choice(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=tuple(first["command"]),
            git=first["git"],
            method=search.method,
            temperature=search.temperature,
            batch_size=search.batch_size,
            options={**search.options, **winner},
            fixed=dict(search.options),
            budget=search.budget,
            rounds=rounds,
            candidates=tuple(self.evidence),
            runs=tuple(str(path) for path in sorted(self.folder.glob("rung-*"))),
            prompts={
                name: tuple(prompt.sha256 for prompt in found.prompts[: self.prompts])
                for name, found in self.sets.items()
            },
            pair=first["pair"],
            fingerprint=first["fingerprint"],
        )


def _measured(data: RunData, rung: int, name: str, point: Options) -> Candidate:
    """One candidate's figures over all datasets."""
    cells = [cell for cell in split_cells(data.requests, data.rounds) if cell.cell.method == name]
    failures = [f for f in data.manifest["failures"] if f["item"].partition("/")[0] == name]
    failure = f"{failures[0]['error']}: {failures[0]['message']}" if failures else None
    return Candidate(
        rung=rung,
        options=dict(point),
        rounds=sum(len(cell.rounds) for cell in cells),
        tokens_per_s=throughput(cells),
        kept=False,
        failure=failure,
    )


def _ranked(measured: Sequence[Candidate], method: str) -> list[Candidate]:
    """The fastest first, the best third of all marked as kept; the failed last, never kept."""

    def speed(candidate: Candidate) -> float:
        return -1.0 if candidate.failure else candidate.tokens_per_s.value or 0.0

    ordered = sorted(measured, key=speed, reverse=True)
    kept = [c for c in ordered if c.failure is None][: _kept(len(ordered))]
    if not kept:
        raise HarnessError(f"{method}: every candidate failed; the first: {ordered[0].failure}")
    return [c.model_copy(update={"kept": c in kept}) for c in ordered]
