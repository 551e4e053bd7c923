"""The losslessness certificate of a run: one verdict for each method, temperature and batch size.

At temperature 0 outputs are compared token by token (`harness.greedy`). At any other, every token
is judged under a clean reference by the tests of `harness.equivalence.battery`, Holm-corrected over
the whole certificate: on exact methods the chance that any verdict fails is at most alpha.

Temperatures and batch sizes are never pooled: a request draws from the same random stream in each
of them, so their outputs are dependent, and Holm's correction holds under any dependence where a
pooled z statistic would not. Repeats, prompts and datasets have streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from harness.equivalence.battery import evidence, run_tests
from harness.equivalence.content import ContentCounts, count_content
from harness.equivalence.hypothesis import TestOutcome, holm
from harness.equivalence.power import smallest_bias
from harness.equivalence.reference_scores import References
from harness.equivalence.replay import (
    Reproducer,
    as_decoded,
    most_telling,
    replay_command,
    round_of,
    smallest_divergence,
)
from harness.equivalence.token_table import (
    Group,
    Scored,
    groups_of,
    rows_of,
    token_table,
    unwatched,
)
from harness.greedy import Divergence, GreedyCheck, ids_are_told, methods_with_own_kernels
from harness.plan import BASELINE

if TYPE_CHECKING:
    from harness.store import RunData

ALPHA = 0.01
BLIND = 0.1  # a test that would miss a tenth of the mass moved to the argmax certifies nothing


class VerdictStatus(StrEnum):
    """What the certificate says of a group."""

    PASS = "pass"
    FAIL = "fail"
    OPEN = "open"  # nothing was found, but too little was looked at


@dataclass(frozen=True, slots=True)
class GreedyOutcome:
    """Greedy outputs against the autoregressive ones; for `ar` its control and other batch sizes.

    Attributes:
        compared: outputs.
        ties: that differ only where two logits are within rounding of each other.
        failures: that differ otherwise.
        threshold: largest gap of a tie, in logits; None when nothing differs.
    """

    compared: int
    ties: int
    failures: int
    threshold: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The certificate of one method at one temperature and batch size.

    Attributes:
        method, temperature, batch_size: the group.
        status: see `VerdictStatus`.
        reason: one line for people.
        outputs, tokens: what was judged.
        tests: every test at temperature > 0.
        greedy: the comparison at temperature 0.
        content: what the outputs look like.
        reproducer: where a failure shows; None without one.
    """

    method: str
    temperature: float
    batch_size: int
    status: VerdictStatus
    reason: str
    outputs: int
    tokens: int
    tests: tuple[TestOutcome, ...]
    greedy: GreedyOutcome | None
    content: ContentCounts
    reproducer: Reproducer | None = None

    @property
    def group(self) -> Group:
        """What the verdict is about."""
        return Group(self.method, self.temperature, self.batch_size)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Every verdict of a run.

    Attributes:
        alpha: chance of any failing verdict when every method is exact, at most.
        reference: what outputs were judged against.
        exact_reference: whether it gives the very logits that the decoders saw.
        verdicts: one for each method, temperature and batch size.
    """

    alpha: float
    reference: str
    exact_reference: bool
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether no method fails."""
        return all(verdict.status is not VerdictStatus.FAIL for verdict in self.verdicts)


def certify(
    run: RunData,
    prompts: Mapping[str, Sequence[int]],
    references: References,
    greedy: GreedyCheck,
    *,
    reference_name: str = "engine",
    alpha: float = ALPHA,
    scored: Scored = unwatched,
) -> Certificate:
    """Judges every method of a run by the tokens that it emitted.

    Args:
        run: a run as read back.
        prompts: request id -> prompt ids.
        references: clean models to score outputs with.
        greedy: the run's greedy outputs, compared.
        reference_name: for the record.
        alpha: of the whole certificate.
        scored: told how many outputs have been scored, of how many.

    Raises:
        StoreError: rounds and outputs that do not fit together.
    """
    config = run.manifest["config"]
    truncated = config["top_k"] > 0 or config["top_p"] < 1
    exact = references.target.exact
    own_kernels = methods_with_own_kernels(run.manifest)
    groups = groups_of(run.requests)
    tables = _tables(run, prompts, references, scored)
    tests = correct(
        {
            group: run_tests(
                table, exact_support=not truncated or (exact and group.method not in own_kernels)
            )
            for group, table in tables.items()
        },
        alpha,
    )
    verdicts = [
        _judge(run, group, tests.get(group, ()), tables.get(group), greedy, alpha)
        for group in groups
    ]
    return Certificate(alpha, reference_name, exact, tuple(_without_control(verdicts)))


def _tables(
    run: RunData, prompts: Mapping[str, Sequence[int]], references: References, scored: Scored
) -> dict[Group, pd.DataFrame]:
    """The token table of each group at temperature > 0; a prompt is prefilled once for all.

    Groups some of whose tokens have no id cannot be scored and have none.
    """
    requests = run.requests
    sampled = requests[requests["temperature"].gt(0) & ~requests["control"]]
    told = [group for group in groups_of(sampled) if ids_are_told(rows_of(sampled, group))]
    if not told:
        return {}
    sampled = pd.concat([rows_of(sampled, group) for group in told])
    table = token_table(run, sampled, prompts, references, scored)
    by_group = table.groupby(list(Group._fields))
    return {Group._make(key): own.reset_index(drop=True) for key, own in by_group}


def correct(
    tests: Mapping[Group, Sequence[TestOutcome]], alpha: float = ALPHA
) -> dict[Group, tuple[TestOutcome, ...]]:
    """Fills in `adjusted` over all tests together, and `smallest_bias` at the level of each.

    The level is that of Holm's first step, alpha over the number of tests: what is seen whatever
    the other tests say.
    """
    adjusted = iter(holm([test.p_value for own in tests.values() for test in own]))
    count = sum(map(len, tests.values()))
    return {
        group: tuple(
            replace(test, adjusted=float(next(adjusted)), smallest_bias=_seen(test, alpha / count))
            for test in own
        )
        for group, own in tests.items()
    }


def _seen(test: TestOutcome, level: float) -> float | None:
    return None if test.variance is None else smallest_bias(test.n, test.variance, level)


def _judge(
    run: RunData,
    group: Group,
    tests: tuple[TestOutcome, ...],
    tokens: pd.DataFrame | None,
    greedy: GreedyCheck,
    alpha: float,
) -> Verdict:
    requests = rows_of(run.requests, group)
    content = count_content(
        requests["output_ids"], requests["finish"], run.manifest.get("stop_token_ids", ())
    )
    told = ids_are_told(requests)
    outcome = _greedy_outcome(run, group, greedy) if group.temperature == 0 and told else None
    judged = _judge_greedy(outcome) if outcome else _judge_tests(tests, alpha)
    if not told:
        judged = _Judged(VerdictStatus.OPEN, "its server tells how many tokens, not which")
    if content.after_eos:
        judged = _Judged(VerdictStatus.FAIL, f"{content.after_eos} outputs go on after their end")
    verdict = Verdict(
        *group,
        *judged,
        outputs=len(requests),
        tokens=int(requests["output_tokens"].sum()),
        tests=tests,
        greedy=outcome,
        content=content,
    )
    if judged.status is not VerdictStatus.FAIL:
        return verdict
    return replace(verdict, reproducer=_reproducer(run, verdict, tokens, greedy))


class _Judged(NamedTuple):
    status: VerdictStatus
    reason: str


def _judge_tests(tests: Sequence[TestOutcome], alpha: float) -> _Judged:
    if not tests:
        return _Judged(VerdictStatus.OPEN, "too few tokens for any test")
    worst = _worst(tests)
    told = (
        f"{worst.test} ({worst.stratum}, {worst.n} tokens): statistic {worst.statistic:.3g}, "
        f"p {worst.p_value:.2g}, {worst.adjusted:.2g} corrected for all tests"
    )
    if worst.adjusted <= alpha:
        return _Judged(VerdictStatus.FAIL, told)
    seen = {test.test: test.smallest_bias for test in tests if test.stratum == "all"}
    biases = [f"{bias:.1%} toward {name}" for name, bias in seen.items() if bias is not None]
    power = f"a bias of {', '.join(biases)} would be seen" if biases else "no directed test"
    blind = (seen.get("argmax") or 1.0) > BLIND
    status = VerdictStatus.OPEN if blind else VerdictStatus.PASS
    return _Judged(status, f"{len(tests)} tests, lowest: {told}; {power}")


def _worst(tests: Sequence[TestOutcome]) -> TestOutcome:
    return min(tests, key=lambda test: (test.adjusted, test.p_value))


def _judge_greedy(outcome: GreedyOutcome) -> _Judged:
    if not outcome.compared:
        return _Judged(VerdictStatus.OPEN, "no autoregressive output to compare with")
    equal = outcome.compared - outcome.ties - outcome.failures
    told = f"{equal} of {outcome.compared} outputs equal, {outcome.ties} within rounding"
    return _Judged(VerdictStatus.FAIL if outcome.failures else VerdictStatus.PASS, told)


def _greedy_outcome(run: RunData, group: Group, greedy: GreedyCheck) -> GreedyOutcome:
    compared = _compared(run, group)["request_id"]
    baseline = rows_of(run.requests, group._replace(method=BASELINE))["request_id"]
    found = _divergences(run, group, greedy)
    ties = sum(divergence.tie for divergence in found)
    own_kernels = group.method in methods_with_own_kernels(run.manifest)
    return GreedyOutcome(
        compared=int(compared.isin(baseline).sum()),
        ties=ties,
        failures=len(found) - ties,
        threshold=greedy.kernel_threshold if own_kernels else greedy.threshold,
    )


def _compared(run: RunData, group: Group) -> pd.DataFrame:
    """The outputs that are compared with the baseline's.

    Its own are those of its control, and at a larger batch size than its smallest all of them.
    """
    own, control = (rows_of(run.requests, group, control=again) for again in (False, True))
    if group.method != BASELINE:
        return own
    sizes = [found.batch_size for found in groups_of(run.requests) if found[:2] == group[:2]]
    return pd.concat([own, control]) if group.batch_size > min(sizes) else control


def _divergences(run: RunData, group: Group, greedy: GreedyCheck) -> list[Divergence]:
    items = set(_compared(run, group)["item"])
    return [found for found in greedy.divergences if found.item in items]


def _without_control(verdicts: Sequence[Verdict]) -> Iterable[Verdict]:
    """Where the baseline itself fails the reference is in doubt, so nobody else passes."""
    failed = {
        verdict.group
        for verdict in verdicts
        if verdict.method == BASELINE and verdict.status is VerdictStatus.FAIL
    }
    for verdict in verdicts:
        control = verdict.group._replace(method=BASELINE)
        if verdict.status is VerdictStatus.PASS and control in failed:
            doubt = f"{BASELINE} itself fails, so the reference is in doubt; {verdict.reason}"
            yield replace(verdict, status=VerdictStatus.OPEN, reason=doubt)
        else:
            yield verdict


class _Place(NamedTuple):
    item: str
    request_id: str
    position: int


def _reproducer(
    run: RunData, verdict: Verdict, tokens: pd.DataFrame | None, greedy: GreedyCheck
) -> Reproducer:
    """The smallest case of a failed verdict."""
    item, name, position = _place(run, verdict, tokens, greedy)
    rounds = run.rounds[run.rounds["item"].eq(item) & run.rounds["request_id"].eq(name)]
    requests = run.requests
    own = requests[requests["item"].eq(item) & requests["request_id"].eq(name)]
    config = run.manifest["config"]
    return Reproducer(
        request_id=name,
        prompt_tokens=int(own["prompt_tokens"].iloc[0]),
        seed=config["seed"],
        position=position,
        round=round_of(position, rounds.sort_values("round")),
        command=replay_command(as_decoded(run.manifest, *verdict.group), *verdict.group),
    )


def _place(
    run: RunData, verdict: Verdict, tokens: pd.DataFrame | None, greedy: GreedyCheck
) -> _Place:
    if verdict.content.after_eos:
        return _first_past_end(run, verdict.group)
    if tokens is None:
        failures = [found for found in _divergences(run, verdict.group, greedy) if not found.tie]
        names = run.requests["request_id"], run.requests["prompt_tokens"]
        lengths = dict(zip(*names, strict=True))
        found = smallest_divergence(failures, lengths)
        return _Place(found.item, found.request_id, found.position)
    token = most_telling(tokens, evidence(tokens, _worst(verdict.tests)))
    return _Place(token["item"], token["request_id"], int(token["position"]))


def _first_past_end(run: RunData, group: Group) -> _Place:
    """The first token behind an end-of-sequence token, in the output with the fewest before it."""
    ends = set(run.manifest["stop_token_ids"])
    places = [
        (row["prompt_tokens"] + position, _Place(row["item"], row["request_id"], position))
        for row in rows_of(run.requests, group).to_dict("records")
        for position, before in enumerate(row["output_ids"][:-1], start=1)
        if before in ends
    ]
    return min(places)[1]
