# SPDX-License-Identifier: Apache-2.0
"""The cost curve: what lies between, before and beyond the measured points."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import randoms
from tests.core.machines import random_curve
from vllm_echo.core.cost import CostCurve, Line, StepLoad

many = settings(max_examples=100, deadline=None, derandomize=True)
NOTHING = [Line(0.0, 0.0)] * 4


def curve_of(
    *points: tuple[int, float], control: float = 0.0, context_us: float = 0.0, node_us: float = 0.0
) -> CostCurve:
    lines = [*NOTHING[:3], Line(5.0, control)]
    return CostCurve(points, *lines, context_us, node_us)


def test_a_line_is_a_fixed_cost_and_one_for_each_item() -> None:
    assert Line(2.0, 0.5)(0) == 2.0
    assert Line(2.0, 0.5)(6) == 5.0


def test_measured_points_are_met_exactly() -> None:
    """Catches an interpolation that is off by one segment."""
    points = ((1, 20.0), (4, 21.0), (16, 19.5), (64, 80.0))
    curve = curve_of(*points)
    assert [curve.step_ms(rows) for rows, _ in points] == [ms for _, ms in points]


def test_costs_are_linear_between_and_beyond_the_points_and_flat_before_them() -> None:
    curve = curve_of((10, 20.0), (20, 30.0), (40, 90.0))
    assert curve.step_ms(15) == 25.0
    assert curve.step_ms(30) == 60.0
    assert curve.step_ms(30.5) == 61.5
    assert curve.step_ms(100) == 270.0, "beyond the last point as between the last two"
    assert curve.step_ms(5) == 20.0


def test_no_step_takes_less_than_no_time() -> None:
    """Catches a curve that is measured from many rows on and turns negative towards none."""
    curve = curve_of((10, 1.0), (20, 31.0))
    assert curve.step_ms(1) == 1.0


def test_one_point_is_a_flat_machine() -> None:
    curve = curve_of((8, 20.0))
    assert [curve.step_ms(rows) for rows in (1, 8, 1000)] == [20.0] * 3


@many
@given(randoms, st.integers(1, 300), st.integers(0, 300))
def test_a_node_more_never_costs_less(source: random.Random, requests: int, prefill: int) -> None:
    """On a machine whose steps get no faster with more rows; catches a price below 0."""
    curve = random_curve(source)
    load = StepLoad(requests, prefill, 100 * requests)
    costs = [curve.nodes_ms(load, nodes) for nodes in range(0, 200, 7)]
    assert costs[0] == 0.0
    assert costs == sorted(costs)


@many
@given(randoms, st.integers(0, 200))
def test_a_node_costs_no_less_in_a_fuller_step(source: random.Random, nodes: int) -> None:
    """What makes K_max shrink under load: each row is dearer than the one before it."""
    curve = random_curve(source)
    costs = [curve.nodes_ms(StepLoad(requests), nodes) for requests in range(1, 300, 13)]
    for fuller, emptier in zip(costs[1:], costs, strict=False):
        assert fuller >= emptier - 1e-9


def test_no_node_makes_a_step_faster() -> None:
    """A fit may find a node's bookkeeping cheaper than a row's (control.each below 0), and noise
    may let a curve fall; a node that gains time would be bought without end."""
    load = StepLoad(4)
    cheap = curve_of((1, 20.0), (64, 20.0), control=-0.5)
    assert [cheap.nodes_ms(load, nodes) >= 0 for nodes in (1, 10, 100)] == [True] * 3


def test_nodes_start_where_the_steps_own_rows_end() -> None:
    """Catches a K_max that forgets roots and prompts."""
    curve = curve_of((1, 20.0), (32, 20.0), (64, 52.0))
    assert curve.nodes_ms(StepLoad(8), 24) == 0.0
    assert curve.nodes_ms(StepLoad(8), 25) == 1.0
    assert curve.nodes_ms(StepLoad(8, num_prefill_tokens=20), 24) == 20.0
    assert curve.nodes_ms(StepLoad(8, num_prefill_tokens=24), 24) == 24.0


def test_a_node_pays_for_its_context_and_its_bookkeeping() -> None:
    """Each node attends to its own request's context: the mean one, not all of them."""
    curve = curve_of((1, 20.0), control=0.25, context_us=9.0, node_us=2.0)
    load = StepLoad(num_requests=4, num_context_tokens=4000)
    assert curve.per_node_ms(load) == pytest.approx(0.25 + 2.0)
    assert curve.nodes_ms(load, 10) == pytest.approx(22.5)
    assert curve.nodes_ms(load, 0) == 0.0


def test_a_plain_step_pays_for_all_contexts_and_for_no_prompt() -> None:
    """Prompts have to be paid in some step; a step with one must not look slow, or else
    candidates look cheap."""
    curve = curve_of((1, 20.0), (101, 120.0), context_us=2.0, node_us=9.0)
    load = StepLoad(num_requests=11, num_prefill_tokens=64, num_context_tokens=5000)
    assert curve.plain_ms(load) == pytest.approx(30.0 + 10.0)


@pytest.mark.parametrize("knee", [1, 2, 8, 32, 64, 128])
@pytest.mark.parametrize("gamma", [0.001, 0.05, 1.0])
def test_the_knee_of_a_hinge_is_found_exactly(knee: int, gamma: float) -> None:
    """T(K) = T_ar * (1 + gamma * max(0, K - K_max)), the paper's model."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    curve = curve_of(*((n, 25.0 * (1 + gamma * max(0, n - knee))) for n in rows))
    assert curve.knee() == knee


@pytest.mark.parametrize("seed", range(20))
def test_the_knee_survives_noise(seed: int) -> None:
    """Measured points jitter by a few percent; the knee may not jump across the curve."""
    source = random.Random(seed)
    points = [
        (n, 25.0 * (1 + 0.05 * max(0, n - 32)) * source.uniform(0.97, 1.03))
        for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
    ]
    assert 24 <= curve_of(*points).knee() <= 48


def test_a_machine_that_slows_down_from_the_first_row_on_has_its_knee_there() -> None:
    assert curve_of((4, 10.0), (8, 20.0), (16, 40.0)).knee() == 4


def test_a_machine_that_never_slows_down_has_its_knee_at_the_end() -> None:
    """Rows up to which a step is flat: all that were measured. Catches a free machine that
    reports a K_max of 1."""
    assert curve_of((1, 20.0), (64, 20.0), (256, 20.0)).knee() == 256


@many
@given(randoms)
def test_a_curve_survives_json(source: random.Random) -> None:
    curve = random_curve(source)
    assert CostCurve.from_dict(curve.to_dict(), "echo.profile") == curve
