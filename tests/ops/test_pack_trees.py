# SPDX-License-Identifier: Apache-2.0
"""Flattening trees: what malformed tables do. Good ones are compared in tests/core/test_packing."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import bits_of, draft_trees, random_tree
from vllm_echo import ops
from vllm_echo.reference import pack as reference


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), max_size=6), extra=st.integers(0, 3), seed=st.integers())
def test_ragged_batches_are_packed_like_the_reference(
    sizes: list[int], extra: int, seed: int
) -> None:
    """Empty trees, wide padding and an empty batch included; padding is rubbish."""
    source = random.Random(seed)
    trees = [random_tree(source, size) for size in sizes]
    given_trees = draft_trees(trees, max([1, *sizes]) + extra)
    cu_rows, tokens, parents, depths, ancestors = ops.pack_trees(
        given_trees.tokens.view(len(trees), -1) if trees else int32([]).view(0, 3),
        given_trees.parents.view(len(trees), -1) if trees else int32([]).view(0, 3),
        given_trees.depths.view(len(trees), -1) if trees else int32([]).view(0, 3),
        given_trees.num_nodes,
    )
    rows = [row for request in reference.pack_trees(trees) for row in request]
    assert tokens.tolist() == [row.token for row in rows]
    assert parents.tolist() == [row.parent for row in rows]
    assert depths.tolist() == [row.depth for row in rows]
    assert [bits_of(words) for words in ancestors] == [row.ancestors for row in rows]
    assert cu_rows.tolist()[-1] == len(rows)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6), seed=st.integers())
def test_a_padded_super_tree_is_the_packed_one_and_padding(sizes: list[int], seed: int) -> None:
    """At any number of rows from the trees' own on; words hold the widest tree there could be."""
    source = random.Random(seed)
    trees = draft_trees([random_tree(source, size) for size in sizes], 130)
    arguments = (trees.tokens, trees.parents, trees.depths, trees.num_nodes)
    packed = ops.pack_trees(*arguments)
    used = len(sizes) + sum(sizes)
    for max_rows in (used, used + 1, used + 63, used + 64):
        cu_rows, tokens, parents, depths, ancestors = ops.pack_trees(*arguments, max_rows)
        assert torch.equal(cu_rows, packed[0])
        for column, own, rest in zip(
            (tokens, parents, depths), packed[1:4], (-1, -1, 0), strict=True
        ):
            assert column.shape == (max_rows,)
            assert torch.equal(column[:used], own)
            assert (column[used:] == rest).all()
        assert ancestors.shape == (max_rows, 3)
        words = packed[4].shape[1]
        assert torch.equal(ancestors[:used, :words], packed[4])
        assert not ancestors[:used, words:].any() and not ancestors[used:].any()
    with pytest.raises(ValueError, match=f"max_rows is {used - 1}, but the trees have {used} rows"):
        ops.pack_trees(*arguments, used - 1)


def test_rows_of_a_wider_table_are_read_by_their_stride() -> None:
    """The tree table hands out its leading columns."""
    wide = int32([[5, 6, 9, 9], [7, 8, 9, 9]])
    parents = int32([[-1, 0, 9, 9], [-1, -1, 9, 9]])
    depths = int32([[1, 2, 9, 9], [1, 1, 9, 9]])
    narrow = ops.pack_trees(wide[:, :2], parents[:, :2], depths[:, :2], int32([2, 2]))
    assert narrow[1].tolist() == [-1, 5, 6, -1, 7, 8]
    assert narrow[2].tolist() == [-1, 0, 1, -1, 0, 0]


@pytest.mark.parametrize("parent", [1, 2, 1000, -2, -(2**31)])
def test_a_parent_that_is_not_before_its_node_is_refused(parent: int) -> None:
    """A cycle or a wild index must not lead out of the table."""
    with pytest.raises(ValueError, match="parents of request 1: that of node 1 is not before it"):
        ops.pack_trees(
            int32([[5, 6], [7, 8]]),
            int32([[-1, 0], [-1, parent]]),
            int32([[1, 2], [1, 2]]),
            int32([2, 2]),
        )


@pytest.mark.parametrize("count", [-1, 3, 2**31 - 1])
def test_a_count_beyond_the_table_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_nodes is {count} for request 0"):
        ops.pack_trees(int32([[5, 6]]), int32([[-1, 0]]), int32([[1, 2]]), int32([count]))
