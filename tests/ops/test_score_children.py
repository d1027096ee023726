# SPDX-License-Identifier: Apache-2.0
"""Calibrated scores by every instruction set, against float64; tests/core has their properties."""

import pytest
import torch

from tests.ops.calls import score_arguments
from vllm_echo import ops

CURVES = torch.tensor([[0.3, 0.9], [-2.0, 1.4]])
# Near certainty, where q - 1 cancels, and to the end of float32.
VALUES = torch.cat(
    [
        -torch.logspace(-12, 2, 3000),
        torch.tensor([0.0, 1e-3, -1e-45, -86.9, -87.1, -1e30, -2e38, torch.inf]),
    ]
)


def exact(values: torch.Tensor, curve: torch.Tensor) -> torch.Tensor:
    x = values.double().clamp(max=-1e-6)
    logit = x - torch.log(-torch.expm1(x))
    intercept, slope = curve.double()
    return torch.nn.functional.logsigmoid(intercept + slope * logit)


@pytest.mark.parametrize("kind", [0, 1])
def test_scores_are_those_of_float64(simd: str, kind: int) -> None:
    """The stated tolerance: sums of float32 rounding over four functions, each within 2 ulp."""
    sampled = torch.tensor([bool(kind)])
    scores = ops.score_children(VALUES[None, None], torch.tensor([0]), sampled, CURVES)[0, 0]
    expected = exact(VALUES, CURVES[kind])
    assert (scores <= 0).all()
    error = (scores.double() - expected).abs() / expected.abs().clamp(min=1)
    assert error.max() < 1e-6


def test_small_scores_keep_their_digits(simd: str) -> None:
    """Of a sure child log P is near 0: catches log(1 + e) that loses what e is."""
    sampled = torch.tensor([False])
    curve = torch.tensor([[8.0, 1.0], [0.0, 1.0]])
    values = -torch.logspace(-6, -1, 500)
    scores = ops.score_children(values[None, None], torch.tensor([0]), sampled, curve)[0, 0]
    torch.testing.assert_close(scores.double(), exact(values, curve[0]), rtol=2e-5, atol=0)


def test_no_child_and_no_number_stay_what_they_are(simd: str) -> None:
    values = torch.tensor([[[-torch.inf, torch.nan, -1.0] * 9]])
    scores = ops.score_children(values, torch.tensor([0]), torch.tensor([True]), CURVES)[0, 0]
    assert scores[0::3].isneginf().all()
    assert scores[1::3].isnan().all()
    assert scores[2::3].unique().numel() == 1


def test_a_batch_of_both_kinds_is_scored_row_by_row(simd: str) -> None:
    """Rows of any length, across the pieces that the operator works in."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1, 1), (3, 1, 5), (97, 3, 3), (5, 9, 31), (2, 1, 700), (0, 3, 2), (4, 0, 3)):
        log_probs = -9 * torch.rand(shape, generator=generator)
        sampled = torch.rand(2 * shape[0] + 1, generator=generator) < 0.5
        requests = torch.arange(shape[0]) * 2
        scores = ops.score_children(log_probs, requests, sampled, CURVES)
        assert scores.shape == log_probs.shape
        for row, request in enumerate(requests.tolist()):
            alone = ops.score_children(
                log_probs[row : row + 1], torch.tensor([0]), sampled[request : request + 1], CURVES
            )
            assert torch.equal(scores[row], alone[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_probs", torch.zeros(2, 3, 2).mT, "log_probs must be contiguous"),
        ("requests", torch.tensor([0]), "requests must have size 2"),
        ("requests", torch.tensor([0, 3]), "requests names request 3 of 3"),
        ("requests", torch.tensor([1, 0]), "requests must ascend"),
        ("curves", torch.zeros(3, 2), "curves must have size 2 in dimension 0"),
        ("curves", torch.zeros(2, 3), "curves must have size 2 in dimension 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"score_children: {message}"):
        ops.score_children(**{**score_arguments(), name: value})
