"""Trees of candidates: cells, positions and who sees whom."""

import pytest
import torch

from impl.engine.kv_cache import KVCache
from impl.engine.token_tree import ROOT, TokenTree


def make_tree():
    """0 and 4 hang on the trunk; 1 and 2 on 0; 3 on 1."""
    tree = TokenTree(trunk=10, capacity=5)
    for token, parent in ((50, ROOT), (51, 0), (52, 0), (53, 1), (54, ROOT)):
        tree.add(token, parent)
    return tree


def test_positions_follow_depth_and_cells_follow_order():
    tree = make_tree()
    assert tree.positions(0) == [10, 11, 11, 12, 10]
    assert tree.cells([3, 4]) == [13, 14]


def test_a_node_sees_its_ancestors_and_itself():
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert make_tree().mask(0).int().tolist() == want
    assert make_tree().mask(3).int().tolist() == want[3:]


def test_capacity_and_parents_are_checked():
    tree = make_tree()
    with pytest.raises(ValueError, match="capacity of 5"):
        tree.add(1)
    with pytest.raises(ValueError, match="parent 0 of node 0"):
        TokenTree(0, 1).add(1, 0)


def make_cache():
    cache = KVCache(
        layers=2, slots=2, kv_heads=1, cells=8, head_dim=1, dtype=torch.float32, device="cpu"
    )
    cache.memory[:] = torch.arange(8.0)[None, None, None, None, :, None]
    cache.memory[1] += 100
    return cache


def test_gather_settles_a_branch_behind_the_trunk_of_its_slot_only():
    cache = make_cache()
    cache.truncate(1, 2)
    cache.gather(1, [2, 5, 7])
    assert cache.lengths == [0, 5]
    assert cache.memory[0, 0, 1, 0, :5, 0].tolist() == [0, 1, 2, 5, 7]
    assert cache.memory[1, 1, 1, 0, :5, 0].tolist() == [100, 101, 102, 105, 107]
    assert cache.memory[0, 0, 0, 0, :, 0].tolist() == list(range(8))


def test_gather_of_overlapping_cells_reads_before_it_writes():
    cache = make_cache()
    cache.truncate(0, 1)
    cache.gather(0, [2, 1])
    assert cache.memory[0, 0, 0, 0, :3, 0].tolist() == [0, 2, 1]


def test_a_length_outside_the_slot_is_refused():
    with pytest.raises(ValueError, match="8 cells"):
        make_cache().truncate(0, 9)
