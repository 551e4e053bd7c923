"""What a run shows, in a few sentences that never claim more than the intervals allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from harness.checks import Status
from harness.summary import BASELINES
from reports.tables import interval_text, present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.statistics import Estimate
    from reports.results import CellResult, CheckResult, RunResult

_NO_BREAK = "\u00a0"  # a space at which no line ends


class Comparison(NamedTuple):
    """The speedup of a method over a baseline on one dataset."""

    dataset: str
    estimate: Estimate

    @property
    def times(self) -> str:
        """Such as `1.72x [1.65, 1.79]`."""
        value, _, interval = interval_text(self.estimate).partition(" ")
        return f"{value}x {interval}".rstrip().replace(" ", _NO_BREAK)

    @property
    def has_interval(self) -> bool:
        return self.estimate.low is not None and self.estimate.high is not None

    @property
    def decided(self) -> bool:
        """Whether there is an interval and it leaves out 1."""
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and not low <= 1 <= high


def sentences(pair: str, result: RunResult) -> list[str]:
    """The verdict: speed, losslessness, and what stands against them, as far as there is any."""
    if not result.measured:
        return [f"On {pair}, no request was finished, so there is nothing to report yet."]
    found = (
        speed_sentence(pair, result.measured),
        lossless_sentences(result),
        doubt_sentence(result),
    )
    return [sentence for sentence in found if sentence]


def speed_sentence(pair: str, cells: Sequence[CellResult]) -> str:
    """The headline, at the lowest temperature and smallest batch size that were measured.

    It is about the method with a speculation cache, which needs the proof, else about the fastest.
    """
    temperature = min(cell.temperature for cell in cells)
    cells = [cell for cell in cells if cell.temperature == temperature]
    batch_size = min(cell.batch_size for cell in cells)
    cells = [cell for cell in cells if cell.batch_size == batch_size]
    where = f"On {pair} at temperature {temperature:g} and batch size {batch_size}"
    method = _headline_method(cells)
    if method is None:
        return f"{where}, no two methods were measured on the same prompts, so no speedup is known."
    clauses = [
        compare(baseline, found)
        for baseline in BASELINES
        if (found := _comparisons(cells, method, baseline))
    ]
    return f"{where}, {method.upper()} decodes {' and '.join(clauses)}."


def greedy_sentence(checks: Sequence[CheckResult]) -> str:
    """Whether greedy outputs were those of autoregressive decoding; empty if none was compared."""
    compared = [check for check in checks if check.status is not Status.SKIP]
    if not compared:
        return "Nothing in this run says whether the outputs are the target model's." * bool(checks)
    divergences = [each for check in compared for each in check.divergences]
    ties = sum(bool(each["tie"]) for each in divergences)
    if failures := len(divergences) - ties:
        return (
            f"Not shown to be lossless: {failures} greedy {_outputs(failures)} differed from AR's "
            "by more than rounding explains."
        )
    if ties:
        return (
            f"Greedy outputs are identical to AR's but for {ties} that part at a numerical tie of "
            "the target's two best logits."
        )
    return "Greedy outputs are identical to AR's in every prompt that was compared."


def lossless_sentences(result: RunResult) -> str:
    """What is known of the outputs, greedy and sampled."""
    greedy = greedy_sentence(result.checks_named("greedy_equality"))
    return " ".join(filter(None, (greedy, sampled_sentence(result))))


def sampled_sentence(result: RunResult) -> str:
    """What the certificate says of outputs at temperature > 0; empty where there are none."""
    if all(cell.temperature == 0 for cell in result.measured):
        return ""
    statuses = [check.status for check in result.checks_named("losslessness")]
    tested = [status for status in statuses if status is not Status.SKIP]
    if failed := tested.count(Status.FAIL):
        return (
            f"Not lossless: {failed} of {len(tested)} tests of sampled outputs failed "
            "(see the checks)."
        )
    if tested:
        return f"Sampled outputs follow the target's distribution in all {len(tested)} tests."
    return "Whether sampled outputs follow the target's distribution was not tested."


def doubt_sentence(result: RunResult) -> str:
    """The failed checks that make the speeds doubtful; empty if none failed."""
    doubts = {
        "aa_control": "AR measured twice differed from itself, so equal differences are noise",
        "quiet_machine": "the machine was disturbed while cells were measured (see the warnings)",
        "invariants": "the stored rounds do not add up to the outputs and times",
    }
    failed = [
        doubt
        for name, doubt in doubts.items()
        if any(check.status is Status.FAIL for check in result.checks_named(name))
    ]
    return f"Beware: {'; '.join(failed)}." if failed else ""


def _outputs(count: int) -> str:
    return "output" if count == 1 else "outputs"


def compare(baseline: str, comparisons: Sequence[Comparison]) -> str:
    """What may be said of a method's speed beside a baseline's, as what follows "decodes"."""
    over = baseline.upper()
    if len(comparisons) == 1:
        return _compare_once(over, comparisons[0])
    slowest = min(comparisons, key=lambda each: each.estimate.value or 0.0)
    fastest = max(comparisons, key=lambda each: each.estimate.value or 0.0)
    clause = (
        f"from {slowest.times} ({slowest.dataset}) to {fastest.times} ({fastest.dataset}) "
        f"as fast as {over}"
    )
    undecided = sum(not each.decided for each in comparisons)
    if undecided:
        clause += f" (no measurable difference on {undecided} of {len(comparisons)} datasets)"
    return clause


def _compare_once(over: str, comparison: Comparison) -> str:
    if not comparison.has_interval:
        return f"{comparison.times} as fast as {over} (one prompt, too few for an interval)"
    if comparison.decided:
        return f"{comparison.times} as fast as {over}"
    return f"with no measurable difference in speed from {over} ({comparison.times})"


def _headline_method(cells: Sequence[CellResult]) -> str | None:
    compared = [
        cell
        for cell in cells
        if any(_comparisons([cell], cell.method, baseline) for baseline in BASELINES)
    ]
    cached = [cell for cell in compared if present(cell.hit_rate)]
    fastest = max(cached or compared, key=lambda cell: cell.tokens_per_s or 0.0, default=None)
    return fastest.method if fastest else None


def _comparisons(cells: Sequence[CellResult], method: str, baseline: str) -> list[Comparison]:
    return [
        Comparison(cell.dataset, estimate)
        for cell in cells
        if cell.method == method != baseline
        and (estimate := cell.speedup.get(baseline)) is not None
        and present(estimate.value)
    ]
