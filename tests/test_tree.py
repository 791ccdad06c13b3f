"""The tree of drafts: its shape, its masks, and what is chosen to be in it."""

import pytest
import torch

from specplug import tree as trees
from specplug.tree import Dynamic, Static, Tree, shape_of


def test_shapes():
    assert (
        shape_of([4, 2, 1]) == Static((4, 2, 1)) and shape_of([4, 2, 1]).size == 20 and shape_of([4, 2, 1]).depth == 3
    )
    assert shape_of(Dynamic(16, 5)).size == 16


@pytest.mark.parametrize("wrong", [[], [0], [2, -1], "4,2", 3, [True], [1.5], Dynamic(0, 3), Dynamic(3, 0), None])
def test_wrong_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="tree="):
        shape_of(wrong)


def test_a_tree():
    tree = Tree([0, 0, 1, 1, 3])
    assert tree.depths == [0, 1, 1, 2, 2, 3] and tree.depth == 3 and not tree.is_chain
    assert tree.children == [[1, 2], [3, 4], [], [5], [], []]
    assert tree.path(5) == [1, 3, 5] and tree.path(0) == []
    assert tree.by_token([7, 8, 7, 9, 5]) == [{7: 1, 8: 2}, {7: 3, 9: 4}, {}, {5: 5}, {}, {}]
    assert Tree([0, 1, 2]).is_chain and Tree([]).is_chain
    with pytest.raises(ValueError, match="parent"):
        Tree([1])


def test_the_mask_shows_what_is_above():
    visible = Tree([0, 0, 1]).visible()
    assert visible.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    mask = trees.attention_mask(visible, torch.tensor([[False, True]]), torch.float32)
    assert mask.shape == (1, 1, 4, 6)
    least = torch.finfo(torch.float32).min
    assert mask[0, 0, 2].tolist() == [least, 0, 0, least, 0, least]


def test_cutting_a_tree():
    tree = Tree([0, 0, 1, 1, 3])
    assert tree.only([0, 1, 3]).parents == [-1, 0, 0, 1]


def test_best_leaves_out_what_cannot_come():
    values = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0]])
    assert trees.best(values, [2, 3]) == [[1, 2], [1]]
    assert trees.best(values, [0, 0]) == [[], []]
    assert trees.best(values, [9, 1]) == [[1, 2, 0], [1]]


def test_shares_go_where_the_paths_are_likely():
    counts = trees.shares(torch.tensor([0.9, 0.1]), torch.tensor([[0.5, 0.4, 0.1], [1.0, 0.0, 0.0]]), 3)
    assert counts == [2, 1]
    assert trees.shares(torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]), 5) == [1]
