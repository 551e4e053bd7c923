"""Greedy outputs against autoregressive ones: where they part, and whether that is a fault.

At temperature 0 every lossless method emits the target's argmax at each position. Two correct
programs can still part where the two best logits lie closer together than rounding moves them
(another batch shape, another order of summation): a numerical tie. Anything wider is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from harness.decoder import UNKNOWN_TOKEN, FinishReason
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

    def dtype_noise(self, prompt_ids: TokenIds, output_ids: TokenIds) -> float:
        """Largest change of a logit between scoring the output in the run's dtype and float32."""


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
        kernel_threshold: the same for methods with kernels of their own.
    """

    compared: int
    threshold: float | None
    divergences: tuple[Divergence, ...]
    kernel_threshold: float | None = None


class _Pair(NamedTuple):
    """One request's output by a method, and the autoregressive one."""

    item: str
    request_id: str
    method: str
    output: tuple[int, ...]
    expected: tuple[int, ...]

    @property
    def position(self) -> int:
        """First index at which the two differ; the shorter one's length if it is a prefix."""
        together = zip(self.output, self.expected, strict=False)
        shorter = min(len(self.output), len(self.expected))
        return next((i for i, (ours, theirs) in enumerate(together) if ours != theirs), shorter)


def check_greedy(
    requests: pd.DataFrame,
    prompts: Mapping[str, TokenIds],
    reference: Reference,
    own_kernels: Collection[str] = (),
) -> GreedyCheck:
    """Compares every greedy output with the autoregressive one at the same batch size.

    Autoregressive outputs at other batch sizes are compared with those at the smallest: a control
    of what a batch alone does to an output, with no speculation in it.

    The threshold is calibrated on the run itself: the largest change of any logit between scoring
    the tokens one at a time and in one pass, over the first `CALIBRATION_OUTPUTS` outputs that
    diverge, up to where they do. A method with kernels of its own rounds everywhere, not only where
    a batch differs: there it is twice the largest change of any logit between the run's dtype and
    float32, once for either side. Outputs with tokens that no server told are not compared.

    Args:
        requests: `requests.parquet` (docs/run-directory.md).
        prompts: request id -> prompt ids.
        reference: the clean target; not used when nothing diverges.
        own_kernels: methods with kernels of their own.
    """
    pairs = list(_pairs(requests))
    parted = [pair for pair in pairs if pair.output != pair.expected]
    ours = [pair for pair in parted if pair.method not in own_kernels]
    others = [pair for pair in parted if pair.method in own_kernels]
    threshold = _largest(reference.rounding_noise, prompts, ours)
    noise = _largest(reference.dtype_noise, prompts, others)
    kernel_threshold = None if noise is None else 2 * noise
    found = [
        _classify(pair, prompts[pair.request_id], reference, limit or 0.0)
        for some, limit in ((ours, threshold), (others, kernel_threshold))
        for pair in some
    ]
    return GreedyCheck(len(pairs), threshold, tuple(found), kernel_threshold)


def methods_with_own_kernels(manifest: Mapping[str, Any]) -> frozenset[str]:
    """The methods of a run whose logits differ from the engine's by rounding, by its manifest."""
    cells = manifest.get("decoders", {}).items()
    labels = (cell.partition("/")[0] for cell, entry in cells if entry.get("own_kernels"))
    return frozenset(label.partition("@")[0] for label in labels)


def ids_are_told(requests: pd.DataFrame) -> bool:
    """Whether the id of every token is known; a server may tell how many there were and no more."""
    return not any(UNKNOWN_TOKEN in output for output in requests["output_ids"])


def _largest(
    noise: Callable[[TokenIds, TokenIds], float],
    prompts: Mapping[str, TokenIds],
    parted: Sequence[_Pair],
) -> float | None:
    return max(
        (
            noise(prompts[pair.request_id], pair.expected[: pair.position + 1])
            for pair in parted[:CALIBRATION_OUTPUTS]
        ),
        default=None,
    )


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
    size = greedy["batch_size"]
    is_baseline = (greedy["method"] == BASELINE) & ~greedy["control"]
    smallest = size[is_baseline].min()
    judged = greedy.assign(against=size.mask(is_baseline, smallest))
    judged = judged[~is_baseline | (size != smallest)]
    baseline = greedy[is_baseline].assign(against=size)
    both = judged.merge(baseline, on=["request_id", "against"], suffixes=("", "_baseline"))
    for row in both.to_dict("records"):
        output, expected = tuple(row["output_ids"]), tuple(row["output_ids_baseline"])
        if _CUT & {row["finish"], row["finish_baseline"]}:
            shorter = min(len(output), len(expected))
            output, expected = output[:shorter], expected[:shorter]
        if UNKNOWN_TOKEN not in output:
            yield _Pair(row["item"], row["request_id"], row["method"], output, expected)
