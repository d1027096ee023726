# SPDX-License-Identifier: Apache-2.0
"""Calibrated scores: a head's log-probabilities as log acceptance probabilities."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import randoms
from tests.core.machines import random_calibration
from vllm_echo import ops
from vllm_echo.core.acceptance import AcceptanceModel, Calibration, uncalibrated
from vllm_echo.core.score import score_curves
from vllm_echo.reference.score import child_score

many = settings(max_examples=100, deadline=None, derandomize=True)
log_probs = st.floats(-120, 0, width=32)
DEPTHS = 6
# From hopeless to certain, finely, and more finely towards certainty.
LADDER = torch.cat([torch.linspace(-100, -0.01, 4000), -torch.logspace(-2, -12, 500)])


def scored(
    calibration: Calibration, depth: int, values: torch.Tensor, sampled: bool = False
) -> torch.Tensor:
    """The scores of ``values`` [M], children of one request."""
    return score_children(
        calibration, depth, values[None, None], torch.tensor([0]), torch.tensor([sampled])
    )[0, 0]


def score_children(
    calibration: Calibration,
    depth: int,
    log_probs: torch.Tensor,
    requests: torch.Tensor,
    sampled: torch.Tensor,
) -> torch.Tensor:
    curves = score_curves(calibration, DEPTHS)
    assert curves.shape == (DEPTHS, 2, 2)
    return ops.score_children(log_probs, requests, sampled, curves[depth - 1])


def model_of(*curves: tuple[float, float]) -> AcceptanceModel:
    return AcceptanceModel(curves, (0.5,), uncalibrated().greedy.supply)


@many
@given(randoms, st.integers(1, DEPTHS), st.booleans(), st.lists(log_probs, min_size=1))
def test_scores_agree_with_the_reference(
    source: random.Random, depth: int, sampled: bool, values: list[float]
) -> None:
    """Catches a depth that is off by one, and the curve of the other kind of request."""
    calibration = random_calibration(source)
    model = calibration.sampled if sampled else calibration.greedy
    expected = [child_score(model, depth, value) for value in values]
    scores = scored(calibration, depth, torch.tensor(values), sampled).tolist()
    assert scores == pytest.approx(expected, rel=2e-5, abs=2e-7)


@pytest.mark.parametrize("value", [-0.01, -0.5, -2.0, -30.0])
def test_a_head_that_is_taken_at_its_word_keeps_its_probabilities(value: float) -> None:
    assert scored(uncalibrated(), 1, torch.tensor([value])).item() == pytest.approx(value, rel=1e-5)


@many
@given(randoms, st.integers(1, DEPTHS), st.booleans())
def test_a_likelier_child_scores_no_less(source: random.Random, depth: int, sampled: bool) -> None:
    """Siblings keep the head's order."""
    scores = scored(random_calibration(source), depth, LADDER, sampled)
    assert (scores.diff() >= 0).all()
    assert scores[-1] > scores[0]


@many
@given(randoms, st.integers(1, DEPTHS), st.booleans())
def test_no_score_is_above_0(source: random.Random, depth: int, sampled: bool) -> None:
    """A child never exceeds its parent: its path's score is the parent's plus this."""
    scores = scored(random_calibration(source), depth, LADDER, sampled)
    assert (scores <= 0).all()
    assert not scores.isnan().any()


@pytest.mark.parametrize("intercept", [-200.0, -3.0, 0.0, 3.0, 200.0])
@pytest.mark.parametrize("slope", [1e-6, 1.0, 50.0])
def test_the_steepest_curves_stay_within_bounds(intercept: float, slope: float) -> None:
    """Catches a sigmoid that overflows to NaN, or rounds to a probability above 1."""
    model = model_of((intercept, slope))
    scores = scored(Calibration(model, model), 1, LADDER)
    assert (scores <= 0).all()
    assert scores.isfinite().all()


@many
@given(randoms, st.integers(1, DEPTHS), st.booleans())
def test_no_child_stays_no_child(source: random.Random, depth: int, sampled: bool) -> None:
    """-inf marks what may not be drafted; catches a calibration that makes it a poor candidate."""
    values = torch.tensor([-0.5, -torch.inf, -3.0, -torch.inf])
    scores = scored(random_calibration(source), depth, values, sampled)
    assert scores.isneginf().tolist() == [False, True, False, True]
    assert not scores.isnan().any()


@many
@given(randoms, st.integers(1, DEPTHS))
def test_a_sure_child_has_a_finite_score(source: random.Random, depth: int) -> None:
    """q = 1 has no finite logit, and a head does say 1.0 in float32; also just above 0."""
    scores = scored(random_calibration(source), depth, torch.tensor([0.0, 1e-7, -1e-9]))
    assert scores.isfinite().all()
    assert scores.unique().numel() == 1


def test_depths_beyond_the_table_use_its_last_curve() -> None:
    model = model_of((0.0, 1.0), (-1.0, 0.5))
    calibration = Calibration(model, model)
    value = torch.tensor([-0.7])
    first, second, *others = (scored(calibration, d, value).item() for d in range(1, DEPTHS + 1))
    assert first != second
    assert others == [second] * (DEPTHS - 2)


def test_each_request_is_scored_by_its_own_kind() -> None:
    """A batch mixes greedy and sampled requests; catches one curve for all, in any shape."""
    calibration = Calibration(model_of((0.0, 1.0)), model_of((-2.0, 0.7)))
    sampled = torch.tensor([True, False, True])
    values = torch.full((3, 4, 5), -0.7)
    batch = score_children(calibration, 2, values, torch.arange(3), sampled)
    assert batch.shape == values.shape
    for row, kind in zip(batch, sampled.tolist(), strict=True):
        assert row.unique().tolist() == scored(calibration, 2, values[0, 0, :1], kind).tolist()
    last_two = score_children(calibration, 2, values[:2], torch.tensor([1, 2]), sampled)
    assert torch.equal(last_two, batch[1:])


def test_equal_probabilities_score_alike_wherever_they_stand() -> None:
    """Catches logarithms that round differently in the tail of a vector, or for a batch of another
    size: ranks with other batches would break ties differently."""
    generator = torch.Generator().manual_seed(0)
    calibration = random_calibration(random.Random(1))
    for value in (-8 * torch.rand(300, generator=generator)).tolist():
        alone = scored(calibration, 1, torch.tensor([value])).item()
        many_of_them = torch.full((37, 1, 3), value)
        greedy = torch.zeros(37, dtype=torch.bool)
        together = score_children(calibration, 1, many_of_them, torch.arange(37), greedy)
        assert together.unique().tolist() == [alone]


def test_no_request_has_no_score() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    scores = score_children(uncalibrated(), 1, torch.zeros(0, 2, 3), nobody, nobody.bool())
    assert scores.shape == (0, 2, 3)
