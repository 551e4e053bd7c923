"""What a run decodes: cells, work items in their order, and the requests of each item.

Every method of a run gets the very same requests. Knows no decoder and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from harness.config import RunConfig
from harness.decoder import Request, SamplingParams
from harness.encoding import EncodedPrompt
from harness.plan import Cell, WorkItem, make_plan, with_control


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run, item by item.

    Attributes:
        plan: the work items in the order in which they are measured.
        prompts: dataset -> prompt index -> the prompt.
        config: lengths, truncation and seed of the requests.
        eos_token_ids: ids that end a generation.
    """

    plan: tuple[WorkItem, ...]
    prompts: Mapping[str, Mapping[int, EncodedPrompt]]
    config: RunConfig
    eos_token_ids: frozenset[int]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell once, in the order in which they are first measured."""
        return tuple(dict.fromkeys(item.cell for item in self.plan))

    def requests(self, item: WorkItem) -> list[Request]:
        """The requests of an item."""
        prompts = self.prompts[item.cell.dataset]
        pairs = zip(item.request_ids, item.prompt_indices, strict=True)
        return [self._request(name, prompts[index], item.cell) for name, index in pairs]

    def categories(self, item: WorkItem) -> list[str]:
        """The category of each request of an item."""
        prompts = self.prompts[item.cell.dataset]
        return [prompts[index].category for index in item.prompt_indices]

    def warm_up_requests(self, cell: Cell) -> list[Request]:
        """A full batch to warm up on, under ids (so random streams) that no measured one has."""
        prompts = list(self.prompts[cell.dataset].values())[: cell.batch_size]
        if most := self.config.warmup_prompt_tokens:
            prompts = [replace(prompt, ids=prompt.ids[-most:]) for prompt in prompts]
        return [self._request(f"warm-up/{i}", prompt, cell) for i, prompt in enumerate(prompts)]

    def prompt_ids(self) -> dict[str, tuple[int, ...]]:
        """Request id -> prompt ids."""
        return {
            name: self.prompts[item.cell.dataset][index].ids
            for item in self.plan
            for name, index in zip(item.request_ids, item.prompt_indices, strict=True)
        }

    def _request(self, request_id: str, prompt: EncodedPrompt, cell: Cell) -> Request:
        config = self.config
        return Request(
            request_id=request_id,
            prompt_ids=prompt.ids,
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingParams(cell.temperature, config.top_k, config.top_p, config.seed),
            eos_token_ids=self.eos_token_ids,
        )


def make_workload(
    config: RunConfig,
    prompts: Mapping[str, Sequence[EncodedPrompt]],
    eos_token_ids: frozenset[int],
) -> Workload:
    """Plans a run: every method on every dataset, temperature and batch size.

    Args:
        config: the run.
        prompts: dataset -> its encoded prompts, in the order in which they are run.
        eos_token_ids: ids that end a generation.
    """
    axes = product(config.methods, prompts, config.temperatures, config.batch_sizes)
    cells = [Cell(*point) for point in axes]
    plan = make_plan(
        with_control(cells) if config.control else cells,
        {name: len(some) for name, some in prompts.items()},
        config.block_size,
        config.repeats,
        config.seed,
    )
    rows = {name: [prompt.index for prompt in some] for name, some in prompts.items()}
    return Workload(
        plan=tuple(_of_rows(item, rows[item.cell.dataset]) for item in plan),
        prompts={name: {p.index: p for p in some} for name, some in prompts.items()},
        config=config,
        eos_token_ids=eos_token_ids,
    )


def _of_rows(item: WorkItem, rows: Sequence[int]) -> WorkItem:
    """The item with rows of the dataset in place of positions among the picked prompts."""
    return replace(item, prompt_indices=tuple(rows[position] for position in item.prompt_indices))
