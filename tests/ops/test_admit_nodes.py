# SPDX-License-Identifier: Apache-2.0
"""Admission by keys, and the size of a step that pays most. What sizes are good for is tested in
tests/core/test_step_size."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.core.decision import Rule
from vllm_echo.reference import schedule as reference

INF = math.inf
NO_NODE = 2**63 - 1
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


def keys_by_worth(scores: torch.Tensor, caps: torch.Tensor) -> torch.Tensor:
    """[R, C] keys of ranked ``scores``."""
    nothing = torch.zeros(scores.shape, dtype=torch.int32)
    everywhere = torch.full_like(caps, 99)
    table = (nothing, nothing - 1, nothing + 1, scores)
    limits = (caps, everywhere, torch.zeros(0), Rule.PRICE, True, scores.shape[1])
    return ops.order_trees(*table, *limits)[3]


def paying(
    scores: torch.Tensor,
    caps: torch.Tensor,
    added_ms: torch.Tensor,
    num_requests: int,
    plain_ms: float,
) -> list[int]:
    keys = keys_by_worth(scores, caps)
    counts = ops.admit_nodes(keys, ops.fastest_size(keys, added_ms, num_requests, plain_ms))
    assert counts.dtype == torch.int32
    return counts.tolist()


def assert_pays(
    scores: torch.Tensor,
    caps: torch.Tensor,
    added_ms: Sequence[float],
    num_requests: int,
    plain_ms: float = 20.0,
) -> list[int]:
    def tokens_per_ms(nodes: int, accepted: float) -> float:
        return (num_requests + accepted) / (plain_ms + added_ms[nodes])

    possible = [max(0, cap) for cap in caps.tolist()]
    most = len(added_ms) - 1
    expected = reference.best_paying(scores.tolist(), possible, most, tokens_per_ms)
    assert paying(scores, caps, float64(added_ms), num_requests, plain_ms) == expected
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
    assert paying(scores, int32([1] * 4), free_for_two, 4, 20.0) == [1, 1, 0, 0]


def test_of_equally_fast_sizes_the_smallest_is_taken() -> None:
    scores = torch.zeros(1, 4)
    plain = float64([0.0, 5.0, 10.0, 25.0, 40.0])  # 2 tokens in 10 ms, 3 in 15, 4 in 20
    assert paying(scores, int32([4]), plain, 2, 10.0) == [0]
    better = float64([0.0, 2.0, 6.0, 10.0, 14.0])  # 3 in 12 ms, 4 in 16, 5 in 20, 6 in 24
    assert paying(scores, int32([4]), better, 2, 10.0) == [1]


def test_what_is_no_number_is_never_taken() -> None:
    scores = torch.tensor([[-0.5, -0.75], [math.nan, -INF]])
    free = float64([0.0] * 5)
    assert paying(scores, int32([2, 2]), free, 2, 20.0) == [2, 0]
    unknown = float64([0.0, math.nan, 0.0, math.nan, math.nan])
    assert paying(scores, int32([2, 2]), unknown, 2, 20.0) == [2, 0]


def random_keys(source: random.Random, shape: tuple[int, int]) -> torch.Tensor:
    """Ascending rows of distinct keys, with room behind them."""
    keys = torch.full(shape, NO_NODE)
    distinct = source.sample(range(2**40), shape[0] * shape[1])
    for r in range(shape[0]):
        count = source.randint(0, shape[1])
        keys[r, :count] = torch.tensor(sorted(distinct[r * shape[1] :][:count]))
    return keys


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    budget=st.integers(-2, 40) | st.sampled_from([2**31, 2**62, -(2**62)]),
    seed=st.integers(),
)
def test_the_lowest_keys_are_admitted(shape: tuple[int, int], budget: int, seed: int) -> None:
    keys = random_keys(random.Random(seed), shape)
    lowest = sorted((key, r) for r, row in enumerate(keys.tolist()) for key in row if key < NO_NODE)
    admitted = [r for _, r in lowest[: max(budget, 0)]]
    counts = ops.admit_nodes(keys, budget)
    assert counts.tolist() == [admitted.count(r) for r in range(shape[0])]
    assert counts.dtype == torch.int32


def test_a_step_of_256_requests_is_admitted_key_by_key() -> None:
    keys = random_keys(random.Random(0), (256, 255))
    there = int((keys < NO_NODE).sum())
    before = ops.admit_nodes(keys, 0)
    for budget in [*range(1, 300), there - 1, there, there + 1]:
        counts = ops.admit_nodes(keys, budget)
        assert counts.sum() == min(budget, there)
        assert (counts >= before).all(), "a node is taken back"
        before = counts


def test_rows_of_a_wider_table_are_read_by_their_stride() -> None:
    source = random.Random(1)
    scores = random_scores(source, (6, 9), distinct=True)
    wide = torch.full((12, 20), -5)  # what lies between the rows would be admitted first
    view = wide[::2, :9]
    view[:] = keys_by_worth(scores, int32([9] * 6))
    assert not view.is_contiguous()
    added_ms = float64([0.05 * nodes for nodes in range(20)])
    size = ops.fastest_size(view.contiguous(), added_ms, 6, 20.0)
    assert 0 < size == ops.fastest_size(view, added_ms, 6, 20.0)
    assert torch.equal(ops.admit_nodes(view, 7), ops.admit_nodes(view.contiguous(), 7))


def test_no_budget_takes_nothing_whatever_the_step_costs() -> None:
    """An offer of nothing says nothing of the plain step's time."""
    assert paying(torch.zeros(2, 3), int32([3, 3]), float64([0.0]), 2, 0.0) == [0, 0]


@pytest.mark.parametrize("plain_ms", [0.0, -1.0, math.nan])
def test_a_plain_step_that_takes_no_time_is_refused(plain_ms: float) -> None:
    keys = keys_by_worth(torch.zeros(1, 1), int32([1]))
    with pytest.raises(ValueError, match="fastest_size: plain_ms must be positive"):
        ops.fastest_size(keys, float64([0.0, 1.0]), 1, plain_ms)


def test_wrong_sizes_are_refused_by_name() -> None:
    keys, added_ms = keys_by_worth(torch.zeros(2, 3), int32([3, 3])), float64([0.0, 1.0])
    with pytest.raises(ValueError, match="fastest_size: added_ms must begin with 0 nodes"):
        ops.fastest_size(keys, added_ms[:0], 2, 20.0)
    with pytest.raises(ValueError, match="fastest_size: num_requests must not be negative, got -1"):
        ops.fastest_size(keys, added_ms, -1, 20.0)


def test_columns_that_are_apart_are_refused() -> None:
    keys, added_ms = keys_by_worth(torch.zeros(2, 3), int32([3, 3])), float64([0.0, 1.0])
    apart = torch.stack([keys] * 2, dim=-1)[..., 0]
    with pytest.raises(ValueError, match="admit_nodes: keys must be contiguous in its last"):
        ops.admit_nodes(apart, 1)
    with pytest.raises(ValueError, match="fastest_size: keys must be contiguous in its last"):
        ops.fastest_size(apart, added_ms, 2, 20.0)
    with pytest.raises(ValueError, match="fastest_size: added_ms must be contiguous in its last"):
        ops.fastest_size(keys, torch.stack([added_ms] * 2, dim=-1)[..., 0], 2, 20.0)
