"""Greedy outputs against autoregressive ones: where they part, and whether that is a fault.

At temperature 0 every lossless method emits the target's argmax at each position. Two correct
programs can still part where the two best logits lie closer together than rounding moves them
(another batch shape, another order of summation): a numerical tie. Anything wider is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from harness.decoder import FinishReason
from harness.plan import BASELINE

if TYPE_CHECKING:
    import pandas as pd

TokenIds = Sequence[int]

_CUT = {FinishReason.CONTEXT, FinishReason.ROUNDS}

CALIBRATION_OUTPUTS = 4  # one pass per token each: seconds, however many outputs diverge


class Reference(Protocol):
    """A clean copy of the target, with no method's state in it."""

    def token_gap(self, ids: TokenIds, first: int, second: int) -> float:
        """|logit(first) - logit(second)| for the token that follows `ids`."""

    def rounding_noise(self, prompt_ids: TokenIds, output_ids: TokenIds) -> float:
        """Largest change of a logit between scoring the output by single steps and in one pass."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a greedy output differs from the autoregressive one.

    Attributes:
        item: work item of the output.
        request_id: the request.
        position: index in the output.
        expected: the autoregressive token there; None where that output has ended.
        emitted: the method's token there; None where its output has ended.
        gap: distance of the two tokens' logits in the reference; None where one is None.
        tie: the gap is within the threshold, so that neither token is wrong.
    """

    item: str
    request_id: str
    position: int
    expected: int | None
    emitted: int | None
    gap: float | None
    tie: bool


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Every greedy output of a run, compared.

    Attributes:
        compared: outputs that had an autoregressive one to be compared with.
        threshold: largest gap that counts as a tie, in logits; None when nothing diverged.
        divergences: every output that differs.
    """

    compared: int
    threshold: float | None
    divergences: tuple[Divergence, ...]


class _Pair(NamedTuple):
    """One request's output by a method, and the autoregressive one."""

    item: str
    request_id: str
    output: tuple[int, ...]
    expected: tuple[int, ...]

    @property
    def position(self) -> int:
        """First index at which the two differ; the shorter one's length if it is a prefix."""
        together = zip(self.output, self.expected, strict=False)
        shorter = min(len(self.output), len(self.expected))
        return next((i for i, (ours, theirs) in enumerate(together) if ours != theirs), shorter)


def check_greedy(
    requests: pd.DataFrame, prompts: Mapping[str, TokenIds], reference: Reference
) -> GreedyCheck:
    """Compares every greedy output with the autoregressive one at the same batch size.

    The threshold is calibrated on the run itself: the largest change of any logit between scoring
    the tokens one at a time and in one pass, over the first `CALIBRATION_OUTPUTS` outputs that
    diverge, up to where they do.

    Args:
        requests: `requests.parquet` (docs/run-directory.md).
        prompts: request id -> prompt ids.
        reference: the clean target; not used when nothing diverges.
    """
    pairs = list(_pairs(requests))
    parted = [pair for pair in pairs if pair.output != pair.expected]
    if not parted:
        return GreedyCheck(len(pairs), None, ())
    threshold = max(
        reference.rounding_noise(prompts[pair.request_id], pair.expected[: pair.position + 1])
        for pair in parted[:CALIBRATION_OUTPUTS]
    )
    found = (_classify(pair, prompts[pair.request_id], reference, threshold) for pair in parted)
    return GreedyCheck(len(pairs), threshold, tuple(found))


def _classify(pair: _Pair, prompt: TokenIds, reference: Reference, threshold: float) -> Divergence:
    at = pair.position
    expected = pair.expected[at] if at < len(pair.expected) else None
    emitted = pair.output[at] if at < len(pair.output) else None
    gap = None
    if expected is not None and emitted is not None:
        gap = reference.token_gap([*prompt, *pair.expected[:at]], expected, emitted)
    tie = gap is not None and gap <= threshold
    return Divergence(pair.item, pair.request_id, at, expected, emitted, gap, tie)


def _pairs(requests: pd.DataFrame) -> Iterator[_Pair]:
    """Each greedy output beside the autoregressive one of its request and batch size.

    An output that the context's end or a limit of rounds cut short is compared up to there: a
    method that needs room for a whole round stops earlier than one that needs room for a token.
    """
    greedy = requests[requests["temperature"] == 0]
    is_baseline = (greedy["method"] == BASELINE) & ~greedy["control"]
    key = ["request_id", "batch_size"]
    both = greedy[~is_baseline].merge(greedy[is_baseline], on=key, suffixes=("", "_baseline"))
    for row in both.to_dict("records"):
        output, expected = tuple(row["output_ids"]), tuple(row["output_ids_baseline"])
        if _CUT & {row["finish"], row["finish_baseline"]}:
            shorter = min(len(output), len(expected))
            output, expected = output[:shorter], expected[:shorter]
        yield _Pair(row["item"], row["request_id"], output, expected)
