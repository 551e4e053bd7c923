"""What is measured in which order: cells, and the work items that they are cut into.

A run is a fixed sequence of work items, known before anything is decoded. For each repeat and each
group of comparable cells (same dataset, temperature and batch size), the prompts are cut into
blocks, and within a block the cells take turns in a seeded random order: drift of the machine
(temperature, clocks, neighbours) then hits all methods alike. Knows no method but the baseline.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from harness.errors import UsageError

BASELINE = "ar"  # the method that everything is compared with, and the one of the A/A control
_RESERVED = "/@"  # they separate the parts of an id


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One point of the benchmark: what gets a row in the results.

    Attributes:
        method: name in the registry, or a variant of one (`NAME:LABEL`).
        dataset: name of the prompt set.
        temperature: 0 is greedy.
        batch_size: most sequences decoded together.
        control: marks the A/A control, the baseline measured a second time.
    """

    method: str
    dataset: str
    temperature: float
    batch_size: int
    control: bool = False

    def __post_init__(self) -> None:
        for field, name in (("method", self.method), ("dataset", self.dataset)):
            if any(character in name for character in _RESERVED):
                raise UsageError(f'{field} "{name}": a name must hold none of {_RESERVED}')

    @property
    def label(self) -> str:
        """`METHOD`, or `METHOD@control` for the A/A control."""
        return f"{self.method}@control" if self.control else self.method

    @property
    def id(self) -> str:
        """`METHOD[@control]/DATASET/t{T}/b{B}`."""
        temperature = repr(float(self.temperature)).removesuffix(".0")
        return f"{self.label}/{self.dataset}/t{temperature}/b{self.batch_size}"

    @property
    def group(self) -> Cell:
        """The baseline's cell on the same dataset, temperature and batch size."""
        return replace(self, method=BASELINE, control=False)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A cell on one block of prompts: measured without interruption, stored as a whole.

    Attributes:
        cell: what is measured.
        repeat: from 0.
        block: index of the block of prompts, from 0.
        prompt_indices: rows of the dataset.
    """

    cell: Cell
    repeat: int
    block: int
    prompt_indices: tuple[int, ...]

    @property
    def id(self) -> str:
        """`{cell}/r{R}/k{BLOCK}`."""
        return f"{self.cell.id}/r{self.repeat}/k{self.block}"

    @property
    def request_ids(self) -> tuple[str, ...]:
        """`DATASET/PROMPT_INDEX/r{R}` for each prompt: the same for every method."""
        return tuple(f"{self.cell.dataset}/{i}/r{self.repeat}" for i in self.prompt_indices)


def with_control(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Adds the A/A control: every cell of the baseline once more."""
    cells = tuple(cells)
    baselines = [cell for cell in cells if cell.method == BASELINE]
    return tuple(dict.fromkeys([*cells, *(replace(cell, control=True) for cell in baselines)]))


def make_plan(
    cells: Iterable[Cell],
    prompts_per_dataset: Mapping[str, int],
    block_size: int,
    repeats: int,
    seed: int,
) -> tuple[WorkItem, ...]:
    """All work items in the order in which they are measured.

    The same arguments give the same plan, whatever the order of `cells` inside their groups.

    Args:
        cells: every cell once; groups keep the order of their first cell.
        prompts_per_dataset: number of prompts of each dataset.
        block_size: fewest prompts in a block; raised to twice the batch size, so that a slot is
            refilled at least once and the batch is full for most of the item.
        repeats: how often every cell decodes every prompt.
        seed: of the order inside the blocks.
    """
    groups: dict[Cell, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return tuple(
        WorkItem(cell, repeat, block, indices)
        for repeat in range(repeats)
        for group, members in groups.items()
        for block, indices in enumerate(
            _blocks(prompts_per_dataset[group.dataset], max(block_size, 2 * group.batch_size))
        )
        for cell in _shuffled(members, f"{seed}/{group.id}/r{repeat}/k{block}")
    )


def _blocks(prompts: int, size: int) -> list[tuple[int, ...]]:
    """Consecutive blocks of even lengths, none shorter than `size` unless there is but one."""
    count = max(1, prompts // size)
    edges = [i * prompts // count for i in range(count + 1)]
    return [tuple(range(low, high)) for low, high in pairwise(edges)]


def _shuffled(cells: Iterable[Cell], seed: str) -> list[Cell]:
    order = sorted(cells)
    random.Random(seed).shuffle(order)
    return order
