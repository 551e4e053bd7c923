import random
from collections import Counter

import pytest

from harness.errors import UsageError
from harness.plan import Cell, WorkItem, make_plan, with_control

AR, SD, SSD = (Cell(method, "mini", 0.0, 1) for method in ("ar", "sd", "ssd"))


def plan(cells=(AR, SD, SSD), prompts=12, block_size=4, repeats=1, seed=0):
    return make_plan(cells, {"mini": prompts}, block_size, repeats, seed)


def test_ids_say_what_is_measured():
    cell = Cell("ar", "mini", 0.6, 4, control=True)
    item = WorkItem(cell, repeat=1, block=2, prompt_indices=(8, 9))
    assert cell.id == "ar@control/mini/t0.6/b4"
    assert Cell("ssd", "mini", 1.0, 1).id == "ssd/mini/t1/b1"
    assert item.id == "ar@control/mini/t0.6/b4/r1/k2"
    assert item.request_ids == ("mini/8/r1", "mini/9/r1")


@pytest.mark.parametrize("name", ["a/b", "a@b"])
def test_names_that_would_break_an_id_are_refused(name):
    with pytest.raises(UsageError, match="dataset"):
        Cell("ar", name, 0.0, 1)


def test_every_cell_sees_every_prompt_once_a_repeat():
    seen = Counter((i.cell, i.repeat, p) for i in plan(repeats=2) for p in i.prompt_indices)
    assert seen == {(c, r, p): 1 for c in (AR, SD, SSD) for r in range(2) for p in range(12)}


def test_cells_take_turns_within_each_block():
    items = plan()
    turns = [items[i : i + 3] for i in range(0, 9, 3)]
    assert [{item.block for item in turn} for turn in turns] == [{0}, {1}, {2}]
    assert all({item.cell for item in turn} == {AR, SD, SSD} for turn in turns)


def test_no_method_is_always_first():
    items = plan(prompts=400)  # 100 blocks: a fair order puts each cell first about 33 times
    first = Counter(items[i].cell for i in range(0, len(items), 3))
    assert min(first[cell] for cell in (AR, SD, SSD)) > 15  # below 1e-4 by chance


def test_the_plan_depends_on_the_seed_and_not_on_the_order_of_methods():
    assert plan(cells=(SSD, AR, SD)) == plan()
    assert plan(seed=1, prompts=48) != plan(seed=0, prompts=48)
    random.seed(5)
    assert plan() == plan()


@pytest.mark.parametrize(
    ("prompts", "batch_size", "lengths"),
    [
        (12, 1, [4, 4, 4]),
        (11, 1, [5, 6]),  # never a short block at the end
        (3, 1, [3]),
        (24, 4, [8, 8, 8]),  # twice the batch size: every slot is refilled
        (6, 8, [6]),
    ],
)
def test_blocks_are_even_and_large_enough(prompts, batch_size, lengths):
    items = plan([Cell("ar", "mini", 0.0, batch_size)], prompts=prompts)
    assert [len(item.prompt_indices) for item in items] == lengths
    assert [p for item in items for p in item.prompt_indices] == list(range(prompts))


def test_the_control_is_added_to_every_baseline_cell_once():
    other = Cell("ar", "mini", 1.0, 4)
    control = Cell("ar", "mini", 0.0, 1, control=True)
    control_of_other = Cell("ar", "mini", 1.0, 4, control=True)
    assert with_control([AR, SD, other]) == (AR, SD, other, control, control_of_other)
    assert with_control(with_control([AR, SD])) == (AR, SD, control)
    assert {item.cell for item in plan(cells=with_control([AR, SD]))} == {AR, SD, control}
