# SPDX-License-Identifier: Apache-2.0
"""Cost curves from step logs of a machine that is known."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.kit import CURVE, FakeMachine
from vllm_echo.calibration.profile import (
    SHORT_CONTEXT,
    STEPS,
    Measurement,
    Measurements,
    measure,
    take_measurements,
    whole_steps,
)
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad

LONG = 1024


def measured(
    machine: Callable[[int, int, dict[str, Any]], list[dict[str, Any]]],
    max_requests: int = 64,
    max_nodes: int = 8,
) -> Measurements:
    return take_measurements(machine, max_requests, max_nodes, LONG, lambda done, total: None)


def assert_close(found: CostCurve, true: CostCurve, tolerance: float) -> None:
    """Every line at the sizes that occur, relative to what it has there."""
    assert {rows for rows, _ in found.step} >= {rows for rows, _ in true.step}
    for rows, ms in found.step:
        assert ms == pytest.approx(true.step_ms(rows), rel=tolerance)
    for name in ("roots", "layer", "catch_up"):
        for count in (1, 8, 32):
            expected = getattr(true, name)(count)
            assert getattr(found, name)(count) == pytest.approx(expected, rel=5 * tolerance), name
    assert found.context_us == pytest.approx(true.context_us, rel=20 * tolerance)
    spread = 20 * tolerance * true.context_us  # what is left when the requests' share is taken off
    assert found.node_context_us == pytest.approx(true.node_context_us, abs=spread)


def test_a_machine_without_noise_is_recovered() -> None:
    """Catches parts of a step that count twice or not at all: the head's run over final rows, the
    context, verification within the step. Tolerance: rounding to four digits."""
    found = measured(FakeMachine()).curve()
    assert_close(found, CURVE, 1e-3)
    assert found.control.fixed == pytest.approx(CURVE.control.fixed, abs=0.01)
    assert found.control.each == pytest.approx(CURVE.control.each, abs=0.001)


def test_noise_of_a_percent_costs_a_few() -> None:
    found = measured(FakeMachine(jitter=0.01)).curve()
    assert_close(found, CURVE, 0.01)
    load = StepLoad(8, 0, 8 * 100)
    assert found.nodes_ms(load, 16) == pytest.approx(CURVE.nodes_ms(load, 16), rel=0.1)
    assert found.knee() == CURVE.knee()


def test_a_node_that_is_cheaper_than_a_row_is_recovered() -> None:
    """Verification can cost less than another request would: control may fall with its nodes."""
    true = replace(CURVE, control=Line(0.5, -0.2))
    found = measured(FakeMachine(true)).curve()
    assert found.control.each == pytest.approx(-0.2, abs=0.005)
    load = StepLoad(8)
    assert found.nodes_ms(load, 16) == pytest.approx(true.nodes_ms(load, 16), rel=0.02)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_other_machines_are_recovered_too(seed: int) -> None:
    source = random.Random(seed)
    rows, ms = [1, 2, 4, 8, 16, 32, 64], source.uniform(5, 50)
    step = []
    for n in rows:
        step.append((n, ms))
        ms += source.choice([0.0, 0.5, 1.5]) * n
    lines = [Line(source.uniform(0.1, 3), source.uniform(0.02, 0.3)) for _ in range(4)]
    context_us = source.uniform(0.1, 2)
    shared = source.choice([0.0, 0.2, 1.0])
    true = CostCurve(tuple(step), *lines, context_us, shared * context_us)
    assert_close(measured(FakeMachine(true)).curve(), true, 2e-3)


def test_each_run_is_told_what_it_measures() -> None:
    """Batch sizes by powers of two and the largest, one long context, trees of several shapes; no
    more nodes than the engine has room for. What is compared is run side by side, and all of it
    once more."""
    machine = FakeMachine()
    heard: list[tuple[int, int]] = []
    take_measurements(machine, 6, 4, LONG, lambda *told: heard.append(told))
    calls = machine.calls[: len(machine.calls) // 2]
    assert machine.calls[len(calls) :] == calls
    told = [(n, context, options.get("num_speculative_tokens", 0)) for n, context, options in calls]
    assert told == [
        *((n, SHORT_CONTEXT, nodes) for n in (1, 2) for nodes in (0, 4, 2, 1)),
        (4, SHORT_CONTEXT, 0),
        *((4, LONG, nodes) for nodes in (0, 4)),
        *((4, SHORT_CONTEXT, nodes) for nodes in (4, 2, 1)),
        (6, SHORT_CONTEXT, 0),
    ]
    for _, _, options in calls:
        EchoConfig.from_dict(options)
    total = len(machine.calls)
    assert heard == [(done, total) for done in range(total + 1)]


def measurement(**values: float) -> Measurement:
    names = Measurement.__dataclass_fields__
    return Measurement(**{name: values.get(name, 0.0) for name in names})  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_whatever_was_measured_no_price_is_negative_and_all_are_numbers(seed: int) -> None:
    """A busy machine measures anything. Catches negative slopes, which would make drafting pay for
    itself, and divisions by nothing."""
    source = random.Random(seed)

    def anything(requests: int, **values: float) -> Measurement:
        parts = {name: source.uniform(0, 5) for name in ("catch_up", "draft")}
        period = sum(parts.values()) + source.uniform(0, 30)
        context = source.choice([64.0, 64.0, 80.0, 1000.0])
        return measurement(
            **{"requests": requests, "context": context, "period": period, **parts, **values}
        )

    counts = [1, 2, 4]
    trees = [
        anything(
            n, nodes=source.choice([0.0, n, 4.0 * n]), layers=layers, frontier_nodes=n * layers
        )
        for n in counts
        for layers in (0.0, 1.0, 3.0)
    ]
    plain = [anything(n) for n in counts]
    long_tree = anything(4, nodes=source.choice([0.0, 16.0, 32.0]))
    found = Measurements(plain, trees, anything(4), long_tree).curve()
    for line in (found.roots, found.layer, found.catch_up):
        assert line.fixed >= 0
        assert line.each >= 0
    assert found.control.fixed >= 0
    assert 0 <= found.node_context_us <= found.context_us
    times = [ms for _, ms in found.step]
    assert times == sorted(times)
    assert times[0] >= 0
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert CostCurve.from_dict(json.loads(text), "echo.profile") == found


def test_one_request_and_one_node_are_enough_for_a_curve() -> None:
    """The smallest profile there is: one batch size, one shape."""
    found = measured(FakeMachine(), max_requests=1, max_nodes=1).curve()
    assert found.step[0] == (1, pytest.approx(20.0, rel=1e-3))
    assert [rows for rows, _ in found.step] == [1, 2]
    assert found.roots(1) == pytest.approx(CURVE.roots(1), rel=0.01)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_long_context_that_is_none_is_no_division() -> None:
    """A model so short that both contexts are the same."""
    plain = [measurement(requests=1, context=64, period=20)]
    trees = [measurement(requests=1, context=64, period=25, nodes=1)]
    found = Measurements(plain, trees, plain[0], trees[0]).curve()
    assert (found.context_us, found.node_context_us) == (0, 0)


def test_trees_without_nodes_are_no_division() -> None:
    """A model so short that nothing could be drafted, and steps that were shorter by chance."""
    plain = [measurement(requests=1, context=64, period=20)]
    trees = [measurement(requests=1, context=64, period=15)]
    assert Measurements(plain, trees, *plain, *trees).curve().control == Line(0.0, 0.0)


def test_only_steps_of_the_whole_batch_count() -> None:
    """Catches prefill, cold steps at the beginning, and the thin end in the times: here those
    are the most."""
    log = FakeMachine()(4, 64, {"k_max": 0})
    assert len(log) > STEPS

    def slow(step: dict[str, Any], **counts: float) -> dict[str, Any]:
        return {**step, "period": 9.0, "counts": {**step["counts"], **counts}}

    cold = [slow(step) for step in log[1:5]]
    prompts = [slow(step, rows=400.0) for step in log[6:12]]
    thin = [slow(step, requests=3.0) for step in log[12:20]]
    good = log[5:9]
    run = [*cold, *good[:2], *prompts, *good[2:], slow(log[9]), *thin]
    assert whole_steps(run, 4) == good


def test_steps_that_are_disturbed_are_not_the_measure() -> None:
    """Others on the machine only add to a time: here to two steps of three, where a median would
    already be theirs."""
    log = FakeMachine()(4, 64, {"k_max": 0})
    steps = whole_steps(log, 4)
    clean = measure(steps, 4).period
    for index, step in enumerate(steps):
        step["period"] *= 1 if index % 3 == 0 else 20
    assert measure(steps, 4).period == pytest.approx(clean, rel=1e-2)


def test_a_machine_that_is_busy_in_one_pass_is_measured_by_the_other() -> None:
    """Catches passes that overwrite each other, and runs that are paired with the wrong steps."""
    machine = FakeMachine()

    def busy_at_first(requests: int, context: int, options: dict[str, Any]) -> list[dict[str, Any]]:
        log = machine(requests, context, options)
        half = 7 + 6 * 4 + 2  # runs of a pass: batch sizes, sizes by shapes, long contexts
        if len(machine.calls) <= half:
            for step in log:
                step["period"] *= 1.5
        return log

    assert_close(measured(busy_at_first).curve(), CURVE, 2e-3)
