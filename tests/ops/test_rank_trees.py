# SPDX-License-Identifier: Apache-2.0
"""Ranking candidates, malformed tables included; tests/core/test_grants ranks what is drafted."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops

NAN = math.nan
INF = math.inf
SCORES = [0.0, -0.0, -0.5, -0.5, -1.0, -120.0, -3.0e38, INF, -INF, NAN]


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rank_row(
    tokens: list, parents: list, depths: list, scores: list, max_nodes: int
) -> list[tuple[int, int, int, float]]:
    """The obvious version, of one request."""
    scores = [-INF if math.isnan(score) else score for score in scores]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    place = {-1: -1, **{index: rank for rank, index in enumerate(order)}}
    return [(tokens[i], place[parents[i]], depths[i], scores[i]) for i in order[:max_nodes]]


def assert_ranked(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    max_nodes: int,
) -> None:
    got = ops.rank_trees(tokens, parents, depths, scores, max_nodes)
    assert [column.dtype for column in got] == [torch.int32] * 3 + [torch.float32]
    width = min(max_nodes, scores.shape[1])
    for column in got:
        assert column.shape == (scores.shape[0], width)
    rows = zip(tokens.tolist(), parents.tolist(), depths.tolist(), scores.tolist(), strict=True)
    ranked = zip(*(column.tolist() for column in got), strict=True)
    for row, columns in zip(rows, ranked, strict=True):
        assert list(zip(*columns, strict=True)) == rank_row(*row, max_nodes)


def random_table(
    source: random.Random, shape: tuple[int, int], scores: list[float] | None = None
) -> tuple[torch.Tensor, ...]:
    """Any parents, before and behind: ranking asks only that they are candidates."""
    num_candidates = shape[1]

    def table(draw: Callable[[], float], dtype: torch.dtype) -> torch.Tensor:
        values = [[draw() for _ in range(num_candidates)] for _ in range(shape[0])]
        return torch.tensor(values, dtype=dtype).view(shape)

    return (
        table(lambda: source.randrange(2**31), torch.int32),
        table(lambda: source.randrange(-1, num_candidates), torch.int32),
        table(lambda: source.randrange(1, 99), torch.int32),
        table(
            lambda: source.choice(scores) if scores else source.uniform(-9.0, 0.0), torch.float32
        ),
    )


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 40)),
    max_nodes=st.one_of(st.integers(0, 45), st.just(2**62)),
    distinct=st.booleans(),
    seed=st.integers(),
)
def test_any_table_is_ranked_as_the_obvious_version(
    shape: tuple[int, int], max_nodes: int, distinct: bool, seed: int
) -> None:
    """Ties, both zeros, NaN and infinities, no request and no candidate included."""
    table = random_table(random.Random(seed), shape, None if distinct else SCORES)
    assert_ranked(*table, max_nodes)


def test_a_large_table() -> None:
    """More candidates than any policy drafts, few distinct scores: long ties."""
    source = random.Random(0)
    assert_ranked(*random_table(source, (3, 16_000)), 255)
    assert_ranked(*random_table(source, (2, 16_000), SCORES), 16_000)
    assert_ranked(*random_table(source, (256, 60), SCORES), 30)


def test_ties_go_by_index_and_impossible_candidates_come_last_in_theirs() -> None:
    tokens, parents, depths, scores = ops.rank_trees(
        int32([[0, 1, 2, 3, 4, 5, 6]]),
        int32([[-1, -1, -1, 2, 2, -1, 3]]),
        int32([[1, 1, 1, 2, 2, 1, 3]]),
        torch.tensor([[-INF, 0.0, -0.0, -1.0, NAN, -INF, -1.0]]),
        7,
    )
    assert tokens.tolist() == [[1, 2, 3, 6, 0, 4, 5]]
    assert parents.tolist() == [[-1, -1, 1, 2, -1, 1, -1]]
    assert depths.tolist() == [[1, 1, 2, 3, 1, 2, 1]]
    assert scores.tolist() == [[0.0, 0.0, -1.0, -1.0, -INF, -INF, -INF]]


def test_scores_come_back_bit_by_bit() -> None:
    """Catches a sort by something coarser than float32, and one that loses the smallest."""
    values = torch.tensor([[1e-45, -1e-45, -1e-38, -0.1, 1.5, -(2.0**127)]])
    above = torch.nextafter(values, torch.full_like(values, INF))
    scores = torch.cat([values, above], dim=1)
    nothing = torch.zeros_like(scores, dtype=torch.int32)
    ranked = ops.rank_trees(nothing, nothing - 1, nothing, scores, 99)[3]
    assert torch.equal(ranked, scores.sort(dim=1, descending=True).values)


def test_rows_of_a_wider_table_are_read_by_their_stride() -> None:
    """The drafter hands out leading columns, and one row of depths for all requests."""
    tokens, parents, depths, scores = random_table(random.Random(1), (6, 12))
    wide = parents.clamp(max=8)  # of the first 9 columns
    depths = depths[0].expand(6, 12)
    assert depths.stride(0) == 0
    narrow = tokens[:, :9], wide[:, :9], depths[:, :9], scores[:, :9]
    assert_ranked(*narrow, 4)
    assert_ranked(*(column[1::2] for column in narrow), 20)
    assert_ranked(*(column[:, 2:3] for column in (tokens, wide.clamp(max=0), depths, scores)), 1)


@pytest.mark.parametrize("parent", [3, 1000, 2**31 - 1, -2, -(2**31)])
def test_a_parent_that_is_no_candidate_is_refused(parent: int) -> None:
    """A wild index must not lead out of the table."""
    tokens, depths = int32([[5, 6, 7]] * 2), int32([[1, 2, 2]] * 2)
    parents = int32([[-1, 0, 0], [-1, 0, parent]])
    scores = torch.tensor([[0.0, -1.0, -2.0], [-0.5, -2.0, -1.0]])
    with pytest.raises(
        ValueError, match="parents of request 1: that of candidate 2 is none of its 3 candidates"
    ):
        ops.rank_trees(tokens, parents, depths, scores, 2)
    kept = ops.rank_trees(tokens, parents, depths, scores, 1)  # it is not among the kept
    assert kept[1].tolist() == [[-1], [-1]]


@pytest.mark.parametrize("blamed", ["parents", "depths", "scores"])
def test_tables_of_different_shapes_are_refused(blamed: str) -> None:
    names = "tokens", "parents", "depths", "scores"
    table = dict(zip(names, random_table(random.Random(2), (3, 4)), strict=True))
    for cut, dim in ((table[blamed][:2], 0), (table[blamed][:, :3], 1)):
        with pytest.raises(ValueError, match=f"rank_trees: {blamed} must have size . .* {dim}"):
            ops.rank_trees(**{**table, blamed: cut}, max_nodes=4)


@pytest.mark.parametrize("blamed", [0, 1, 2, 3])
def test_columns_that_are_apart_are_refused(blamed: int) -> None:
    table = list(random_table(random.Random(3), (3, 4)))
    table[blamed] = table[blamed].mT.contiguous().mT
    with pytest.raises(ValueError, match="must be contiguous in its last dimension"):
        ops.rank_trees(*table, 4)


def test_a_negative_width_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_trees: max_nodes must not be negative, got -1"):
        ops.rank_trees(*random_table(random.Random(4), (1, 2)), -1)
