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
