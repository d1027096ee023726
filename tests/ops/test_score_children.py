# SPDX-License-Identifier: Apache-2.0
"""Calibrated scores, one by one. What they are good for is tested in tests/core/test_score."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops

INF = math.inf
ULP = 2.0**-23
SMALLEST = 2.0**-126  # of the normal numbers


def obvious_score(log_prob: float, intercept: float, slope: float) -> float:
    if log_prob == -INF:
        return -INF
    log_prob = min(log_prob, -1e-6)
    x = intercept + slope * (log_prob - math.log(-math.expm1(log_prob)))
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def one_curve(intercept: float, slope: float) -> torch.Tensor:
    return torch.tensor([[[intercept, slope]]] * 2)


def scores_of(log_probs: torch.Tensor, intercept: float, slope: float) -> torch.Tensor:
    nobody = torch.zeros(log_probs.shape[0], dtype=torch.bool)
    return ops.score_children(log_probs, nobody, one_curve(intercept, slope), 1)


log_probs = st.one_of(
    st.floats(-200, 0, width=32), st.floats(max_value=5.0, width=32), st.just(-INF)
)
curves = st.tuples(st.floats(-250, 250, width=32), st.floats(2.0**-20, 50, width=32))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(log_probs, curves), min_size=1, max_size=40))
def test_scores_agree_with_the_obvious_version_to_the_last_bit_or_so(
    values: list[tuple[float, tuple[float, float]]],
) -> None:
    """Relative to the score, however near 0 it is; one curve a value."""
    for log_prob, curve in values:
        score = scores_of(torch.tensor([log_prob]), *curve).item()
        expected = torch.tensor(obvious_score(log_prob, *curve)).item()  # may overflow to -inf
        assert score == pytest.approx(expected, rel=ULP, abs=SMALLEST)
        assert score <= 0


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers())
def test_each_request_has_its_own_curve_in_any_shape(shape: list[int], seed: int) -> None:
    source = random.Random(seed)
    table = torch.tensor(
        [[[source.uniform(-3, 3), source.uniform(0.1, 2)] for _ in range(4)] for _ in range(2)]
    )
    values = torch.tensor([source.uniform(-8, 0) for _ in range(math.prod(shape))]).view(shape)
    sampled = torch.tensor([source.random() < 0.5 for _ in range(shape[0])], dtype=torch.bool)
    depth = source.randint(1, 4)
    scores = ops.score_children(values, sampled, table, depth)
    assert scores.shape == values.shape
    assert scores.dtype == torch.float32
    for row, kind, given_row in zip(scores, sampled.tolist(), values, strict=True):
        intercept, slope = table[int(kind), depth - 1].tolist()
        expected = [
            obvious_score(value, intercept, slope) for value in given_row.flatten().tolist()
        ]
        assert row.flatten().tolist() == pytest.approx(expected, rel=ULP)


@pytest.mark.parametrize("slope", [1e-6, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("intercept", [-200.0, -1.0, 0.0, 0.25, 200.0])
def test_neighbouring_numbers_keep_their_order(simd: str, intercept: float, slope: float) -> None:
    """Catches rounding errors that turn siblings around; in float32 they would."""
    starts = [-100.0, -36.7, -3.0, -math.log(2), -math.log(2) / 2, -0.1, -1e-3, -2e-6]
    for start in starts:
        bits = torch.tensor([start]).view(torch.int32) - torch.arange(20_000, dtype=torch.int32)
        ladder = bits.view(torch.float32)
        assert (ladder.diff() > 0).all()
        assert (scores_of(ladder, intercept, slope).diff() >= 0).all()


def test_a_score_does_not_depend_on_its_place(simd: str) -> None:
    values = -8 * torch.rand(50, generator=torch.Generator().manual_seed(0))
    whole = scores_of(values, 0.25, 0.75)
    for first in range(50):
        assert torch.equal(scores_of(values[first:], 0.25, 0.75), whole[first:])
        assert torch.equal(
            scores_of(values[first : first + 1], 0.25, 0.75), whole[first : first + 1]
        )


def test_what_is_no_probability(simd: str) -> None:
    values = torch.tensor([-INF, -3e38, 0.0, -0.0, 1e-9, 7.0, INF, math.nan])
    none, hopeless, *certain, unknown = scores_of(values, -1.0, 1.0).tolist()
    assert none == -INF
    assert -INF < hopeless < -1e38
    assert certain == [pytest.approx(obvious_score(0.0, -1.0, 1.0), rel=ULP)] * 5
    assert len(set(certain)) == 1
    assert math.isnan(unknown)


def test_any_layout_is_read() -> None:
    values = -torch.rand(4, 6, 5)
    sampled, curve = torch.tensor([True, False, True, False]), torch.rand(2, 7, 2)
    for view in (values[:, 1::2, ::3], values.transpose(1, 2), values[:, :1].expand(4, 3, 5)):
        assert not view.is_contiguous()
        scores = ops.score_children(view, sampled, curve[:, 1:5], 3)
        assert scores.is_contiguous()
        assert torch.equal(scores, ops.score_children(view.contiguous(), sampled, curve, 4))


@pytest.mark.parametrize("depth", [0, -1, 3, 2**62])
def test_a_depth_without_a_curve_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="score_children: depth must be in 1 to 2, got"):
        ops.score_children(torch.zeros(1), torch.zeros(1).bool(), torch.zeros(2, 2, 2), depth)


def test_wrong_sizes_are_refused_by_name() -> None:
    values, sampled, table = torch.zeros(2, 3), torch.zeros(2).bool(), torch.zeros(2, 4, 2)
    with pytest.raises(ValueError, match="score_children: log_probs must have a dimension"):
        ops.score_children(torch.zeros(()), sampled, table, 1)
    with pytest.raises(ValueError, match="score_children: sampled must have size 2"):
        ops.score_children(values, sampled[:1], table, 1)
    with pytest.raises(ValueError, match="score_children: curves must have size 2 in dimension 0"):
        ops.score_children(values, sampled, table[:1], 1)
    with pytest.raises(ValueError, match="score_children: curves must have size 2 in dimension 2"):
        ops.score_children(values, sampled, table[..., :1], 1)
    with pytest.raises(ValueError, match="score_children: curves must be contiguous in its last"):
        ops.score_children(values, sampled, torch.zeros(2, 2, 4).mT, 1)
