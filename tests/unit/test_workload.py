"""Cells, items and requests of a run."""

import pytest

from harness.config import RunConfig
from harness.decoder import SamplingParams
from harness.encoding import EncodedPrompt
from harness.workload import Workload, make_workload

# Three prompts picked from a dataset, in the order of the pick: rows 7, 2 and 5.
PROMPTS = {
    "mini": tuple(EncodedPrompt(row, f"category {row}", (row, row + 1)) for row in (7, 2, 5))
}


def workload(**fields: object) -> Workload:
    config = RunConfig(pair="tiny", methods=("ar", "sd"), max_new_tokens=9, **fields)  # type: ignore[arg-type]
    return make_workload(config, PROMPTS, frozenset({3}))


def test_cells_are_the_product_of_methods_temperatures_and_batch_sizes_and_the_control() -> None:
    cells = workload(temperatures=(0, 1), batch_sizes=(1, 2)).cells
    assert len(cells) == 2 * 2 * 2 + 2 * 2
    assert sum(cell.control for cell in cells) == 4
    assert {cell.method for cell in cells if cell.control} == {"ar"}
    assert not any(cell.control for cell in workload(control=False).cells)


def test_items_name_rows_of_the_dataset_and_each_is_decoded_once_by_every_cell() -> None:
    found = workload(repeats=2, block_size=1)
    for cell in found.cells:
        rows = [row for item in found.plan if item.cell == cell for row in item.prompt_indices]
        assert rows == [7, 2, 5, 7, 2, 5]


def test_a_request_is_the_prompt_with_the_settings_of_the_run() -> None:
    found = workload(temperatures=(0.5,), top_k=4, top_p=0.9, seed=11, block_size=3)
    item = found.plan[0]
    request = found.requests(item)[1]
    assert request.request_id == "mini/2/r0"
    assert request.prompt_ids == (2, 3)
    assert request.max_new_tokens == 9
    assert request.sampling == SamplingParams(temperature=0.5, top_k=4, top_p=0.9, seed=11)
    assert request.eos_token_ids == {3}
    assert found.categories(item) == ["category 7", "category 2", "category 5"]
    assert found.prompt_ids() == {"mini/7/r0": (7, 8), "mini/2/r0": (2, 3), "mini/5/r0": (5, 6)}


@pytest.mark.parametrize("method", ["ar", "sd"])
def test_every_method_gets_the_same_requests(method: str) -> None:
    found = workload(block_size=3)
    by_cell = {item.cell.label: found.requests(item) for item in found.plan}
    assert by_cell[method] == by_cell["ar@control"]


def test_warm_up_uses_ids_that_no_measured_request_has() -> None:
    found = workload(batch_sizes=(2,))
    requests = found.warm_up_requests(found.cells[0])
    assert [request.prompt_ids for request in requests] == [(7, 8), (2, 3)]
    assert not {request.request_id for request in requests} & found.prompt_ids().keys()


@pytest.mark.parametrize(("most", "ids"), [(None, (7, 8)), (1, (8,)), (2, (7, 8)), (9, (7, 8))])
def test_warm_up_prompts_may_be_cut_to_their_last_tokens_and_measured_ones_never(
    most: int | None, ids: tuple[int, ...]
) -> None:
    found = workload(warmup_prompt_tokens=most)
    assert [request.prompt_ids for request in found.warm_up_requests(found.cells[0])] == [ids]
    assert found.requests(found.plan[0])[0].prompt_ids == (7, 8)
