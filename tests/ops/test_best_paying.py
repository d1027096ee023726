# SPDX-License-Identifier: Apache-2.0
"""The size of a step. What it is good for is tested in tests/core/test_best_paying."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.reference import schedule as reference

INF = math.inf
VALUES = [0.0, -0.0, -0.5, -0.5, -1.0, -2.0, -103.0, -104.0, -120.0, -INF]


def int32(values: Sequence) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def float64(values: Sequence) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_scores(source: random.Random, shape: tuple[int, int], distinct: bool) -> torch.Tensor:
    """Descending rows."""
    values = [
        source.uniform(-4.0, 0.0) if distinct else source.choice(VALUES)
        for _ in range(shape[0] * shape[1])
    ]
    return torch.tensor(values).view(shape).sort(dim=1, descending=True).values


def assert_pays(
    scores: torch.Tensor,
    caps: torch.Tensor,
    added_ms: Sequence[float],
    num_requests: int,
    plain_ms: float = 20.0,
) -> list[int]:
    def tokens_per_ms(nodes: int, accepted: float) -> float:
        return (num_requests + accepted) / (plain_ms + added_ms[nodes])

    num_nodes = ops.best_paying(scores, caps, float64(added_ms), num_requests, plain_ms)
    assert num_nodes.dtype == torch.int32
    possible = [max(0, cap) for cap in caps.tolist()]
    most = len(added_ms) - 1
    expected = reference.best_paying(scores.tolist(), possible, most, tokens_per_ms)
    assert num_nodes.tolist() == expected
    return expected


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 7)),
    distinct=st.booleans(),
    others=st.integers(0, 3),
    seed=st.integers(),
)
def test_any_question_is_answered_as_by_the_reference(
    shape: tuple[int, int], distinct: bool, others: int, seed: int
) -> None:
    """Ties, worths that underflow, caps beyond the table and below 0, no request, no candidate."""
    source = random.Random(seed)
    scores = random_scores(source, shape, distinct)
    caps = int32([source.choice([-1, 0, 1, 2, 5, 7, 9, 2**31 - 1]) for _ in range(shape[0])])
    slopes = source.choices([0.0, 0.0, 0.25, 0.5, 3.0, -0.25], k=source.randint(0, 40))
    assert_pays(scores, caps, [0.0, *itertools.accumulate(slopes)], shape[0] + others)


def test_a_large_step() -> None:
    source = random.Random(0)
    caps = int32([source.randint(0, 16) for _ in range(256)])
    for distinct in (True, False):
        scores = random_scores(source, (256, 30), distinct)
        added_ms = [0.01 * nodes for nodes in range(1500)]
        taken = sum(assert_pays(scores, caps, added_ms, 256))
        assert 0 < taken < int(caps.sum())


def test_equal_worths_go_by_request_and_rank_even_if_their_scores_differ() -> None:
    """Near 0, neighbouring scores have the same exp in float32: the better score is no tie-break.
    The worth itself decides, as everywhere else."""
    scores = torch.tensor([[-1e-9], [0.0], [-2e-9], [-0.0]])
    assert_pays(scores, int32([1] * 4), [0.0, 0.0, 0.0, 1e9, 1e9], 4)
    free_for_two = float64([0.0, 0.0, 0.0, 1e9, 1e9])
    assert ops.best_paying(scores, int32([1] * 4), free_for_two, 4, 20.0).tolist() == [1, 1, 0, 0]


def test_of_equally_fast_sizes_the_smallest_is_taken() -> None:
    scores = torch.zeros(1, 4)
    plain = float64([0.0, 5.0, 10.0, 25.0, 40.0])  # 2 tokens in 10 ms, 3 in 15, 4 in 20
    assert ops.best_paying(scores, int32([4]), plain, 2, 10.0).tolist() == [0]
    better = float64([0.0, 2.0, 6.0, 10.0, 14.0])  # 3 in 12 ms, 4 in 16, 5 in 20, 6 in 24
    assert ops.best_paying(scores, int32([4]), better, 2, 10.0).tolist() == [1]


def test_what_is_no_number_is_never_taken() -> None:
    scores = torch.tensor([[-0.5, -0.75], [math.nan, -INF]])
    free = float64([0.0] * 5)
    assert ops.best_paying(scores, int32([2, 2]), free, 2, 20.0).tolist() == [2, 0]
    unknown = float64([0.0, math.nan, 0.0, math.nan, math.nan])
    assert ops.best_paying(scores, int32([2, 2]), unknown, 2, 20.0).tolist() == [2, 0]


def test_rows_of_a_wider_table_are_read_by_their_stride() -> None:
    source = random.Random(1)
    scores = random_scores(source, (6, 9), distinct=True)
    added_ms = [0.5 * nodes for nodes in range(20)]
    for view in (scores[:, :4], scores[::2, :4], scores[:1].expand(6, 9), scores[:, 3:4]):
        caps = int32([source.randint(0, 5) for _ in range(view.shape[0])])
        assert sum(assert_pays(view, caps, added_ms, view.shape[0])) > 0


def test_no_budget_takes_nothing_whatever_the_step_costs() -> None:
    """An offer of nothing says nothing of the plain step's time."""
    assert ops.best_paying(torch.zeros(2, 3), int32([3, 3]), float64([0.0]), 2, 0.0).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize("plain_ms", [0.0, -1.0, math.nan])
def test_a_plain_step_that_takes_no_time_is_refused(plain_ms: float) -> None:
    with pytest.raises(ValueError, match="best_paying: plain_ms must be positive"):
        ops.best_paying(torch.zeros(1, 1), int32([1]), float64([0.0, 1.0]), 1, plain_ms)


def test_wrong_sizes_are_refused_by_name() -> None:
    scores, caps, added_ms = torch.zeros(2, 3), int32([3, 3]), float64([0.0, 1.0])
    with pytest.raises(ValueError, match="best_paying: caps must have size 2 in dimension 0"):
        ops.best_paying(scores, caps[:1], added_ms, 2, 20.0)
    with pytest.raises(ValueError, match="best_paying: added_ms must begin with 0 nodes"):
        ops.best_paying(scores, caps, added_ms[:0], 2, 20.0)
    with pytest.raises(ValueError, match="best_paying: num_requests must not be negative, got -1"):
        ops.best_paying(scores, caps, added_ms, -1, 20.0)


@pytest.mark.parametrize("blamed", [0, 1, 2])
def test_columns_that_are_apart_are_refused(blamed: int) -> None:
    arguments = [torch.zeros(2, 3), int32([3, 3]), float64([0.0, 1.0])]
    arguments[blamed] = torch.stack([arguments[blamed]] * 2, dim=-1)[..., 0]
    with pytest.raises(ValueError, match="must be contiguous in its last dimension"):
        ops.best_paying(*arguments, 2, 20.0)
