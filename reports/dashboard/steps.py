"""Steps of a series: where its level changed for good, and by how much.

Binary segmentation on logarithms. A series is cut in two, or a short stretch is cut out of it,
where the means of the two parts differ most in standard errors, residuals clipped at four standard
deviations of the noise. A cut stands when that is more than `THRESHOLD`, and each part is cut
again. Clipping keeps a single outlier from passing for a step, and each part has at least two
runs: one slow run is not yet a regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

THRESHOLD = 4.5  # standard errors: of series with 2% white noise, under 1 in 100 have a step
TOLERANCE = 0.05  # relative change below which a step is not told
LEAST_RUNS = 2  # on each side of a step

_CLIP = 4.0
_LONGEST_BUMP = 20  # runs; a longer stretch is found by its two edges, one after the other
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True, slots=True)
class Step:
    """A change of level.

    Attributes:
        index: of the first value at the new level.
        before, after: medians of the stretches on both sides, in the series' unit.
        last: median of the last stretch of the series.
    """

    index: int
    before: float
    after: float
    last: float

    @property
    def change(self) -> float:
        """Relative: -0.1 is a tenth less."""
        return self.after / self.before - 1


def find_steps(values: Sequence[float], tolerance: float = TOLERANCE) -> tuple[Step, ...]:
    """The steps of a series, oldest first.

    Args:
        values: one a run, oldest first; a value that is not positive has no logarithm and
            makes the series one without steps.
        tolerance: relative change that is told, at least.
    """
    series = np.asarray(values, dtype=np.float64)
    if len(series) < 2 * LEAST_RUNS or not (series > 0).all():
        return ()
    logs = np.log(series)
    cuts = sorted(_cuts(logs, 0, len(logs), _noise(logs)))
    while (weak := _weakest(series, cuts, tolerance)) is not None:
        cuts.pop(weak)
    levels = _levels(series, cuts)
    return tuple(
        Step(index, before, after, levels[-1])
        for index, before, after in zip(cuts, levels, levels[1:], strict=False)
    )


def _noise(logs: NDArray[np.float64]) -> float:
    """Standard deviation of the noise, from neighbours' differences, which steps hardly touch."""
    differences = np.diff(logs)
    deviation = np.median(np.abs(differences - np.median(differences)))
    return float(_NORMAL * deviation / 2**0.5)


def _cuts(logs: NDArray[np.float64], start: int, end: int, noise: float) -> Iterator[int]:
    n = end - start
    if n < 2 * LEAST_RUNS:
        return
    own = logs[start:end]
    scale = max(noise, 1e-4)  # of values that repeat exactly, anything is a step
    clipped = np.clip((own - np.median(own)) / scale, -_CLIP, _CLIP)
    errors, first, last = max(_stretches(clipped))
    if errors <= THRESHOLD:
        return
    edges = [start, *sorted({start + first, start + last} - {start, end}), end]
    yield from edges[1:-1]
    for left, right in pairwise(edges):
        yield from _cuts(logs, left, right, noise)


def _stretches(values: NDArray[np.float64]) -> Iterator[tuple[float, int, int]]:
    """Stretches that differ most from all the other values: (standard errors, start, end).

    The best of those that begin at the start, and of each short length the best inside.
    """
    n, sums = len(values), np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(LEAST_RUNS, n - LEAST_RUNS + 1)
    yield _best(sums, np.zeros_like(ends), ends)
    for length in range(LEAST_RUNS, min(_LONGEST_BUMP, n - 2 * LEAST_RUNS) + 1):
        starts = np.arange(LEAST_RUNS, n - LEAST_RUNS - length + 1)
        yield _best(sums, starts, starts + length)


def _best(
    sums: NDArray[np.float64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[float, int, int]:
    inside, length, n = sums[ends] - sums[starts], ends - starts, len(sums) - 1
    gap = np.abs(inside / length - (sums[-1] - inside) / (n - length))
    errors = gap / np.sqrt(1 / length + 1 / (n - length))
    best = int(np.argmax(errors))
    return float(errors[best]), int(starts[best]), int(ends[best])


def _levels(series: NDArray[np.float64], cuts: Sequence[int]) -> list[float]:
    ends = [0, *cuts, len(series)]
    return [float(np.median(series[a:b])) for a, b in pairwise(ends)]


def _weakest(series: NDArray[np.float64], cuts: Sequence[int], tolerance: float) -> int | None:
    """The cut with the smallest change if that is within the tolerance, else None."""
    levels = _levels(series, cuts)
    changes = [abs(b / a - 1) for a, b in pairwise(levels)]
    if not changes or min(changes) >= tolerance:
        return None
    return changes.index(min(changes))
