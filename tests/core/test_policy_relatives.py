# SPDX-License-Identifier: Apache-2.0
"""Policies that must coincide where their rules do."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.core.kit import as_lists, randoms
from tests.core.steps import UNLIMITED, Step, decide, random_step
from vllm_echo.core.config import EchoConfig, Gate
from vllm_echo.reference import draft as reference

many = settings(max_examples=60, deadline=None, derandomize=True)


def with_config(step: Step, config: EchoConfig) -> Step:
    return replace(step, config=config)


@pytest.mark.parametrize("depth", [1, 2, 5, 12])
@pytest.mark.parametrize("budget", [0, 1, 4, 9, UNLIMITED])
def test_a_tree_of_width_1_is_the_chain(depth: int, budget: int) -> None:
    """Catches a tree that accepts less than the chain although it holds the same nodes."""
    shape = {"num_speculative_tokens": 12, "max_depth": depth, "target_depth": depth, "gates": ()}
    chain = EchoConfig(policy="chain", **shape)
    tree = EchoConfig(policy="static", top_k=1, **shape)
    for seed in range(20):
        step = random_step(random.Random(seed), num_speculative_tokens=12, budget=budget)
        assert as_lists(decide(with_config(step, tree)).trees) == as_lists(
            decide(with_config(step, chain)).trees
        )


@pytest.mark.parametrize("depth", [1, 2, 5, 12])
def test_echo_of_width_1_without_gates_is_the_chain_when_budget_allows(depth: int) -> None:
    shape = {"num_speculative_tokens": 12, "max_depth": depth, "target_depth": depth, "gates": ()}
    chain = EchoConfig(policy="chain", **shape)
    echo = EchoConfig(policy="echo", top_k=1, **shape)
    for seed in range(20):
        step = random_step(random.Random(seed), num_speculative_tokens=12, budget=UNLIMITED)
        expected = as_lists(decide(with_config(step, chain)).trees)
        assert as_lists(decide(with_config(step, echo)).trees) == expected
        assert any(expected) or not any(limit.max_nodes for limit in step.limits)


@many
@given(randoms)
def test_dense_is_echo_with_the_gates_in_between(source: random.Random) -> None:
    """Catches gates that stand beside the line between their neighbours, or at no depth at all."""
    step = random_step(source, policy="dense", kind="distinct")
    dense = reference.thresholds(step.config)
    gates = tuple(Gate(depth, threshold) for depth, threshold in dense.items())
    echo = replace(step.config, policy="echo", gates=gates)
    assert len(gates) in (0, step.config.max_depth)
    assert_alike(step, with_config(step, echo))


@many
@given(randoms)
def test_fixed_threshold_is_echo_with_equal_gates(source: random.Random) -> None:
    step = random_step(source, policy="fixed-threshold", kind="distinct")
    threshold = step.config.threshold
    gates = tuple(Gate(gate.depth, threshold) for gate in step.config.gates)
    echo = replace(step.config, policy="echo", gates=gates, threshold=0.5)
    assert_alike(step, with_config(step, echo))


@many
@given(randoms)
def test_a_beam_that_never_gives_up_is_the_static_tree_of_full_depth(
    source: random.Random,
) -> None:
    step = random_step(source, policy="ddd", kind="distinct", threshold=0.0)
    static = replace(step.config, policy="static", target_depth=step.config.max_depth)
    assert_alike(step, with_config(step, static))


@many
@given(randoms)
def test_a_beam_that_always_gives_up_is_the_static_tree_of_target_depth(
    source: random.Random,
) -> None:
    """One node a layer never holds more than all of the probability."""
    step = random_step(source, policy="ddd", kind="distinct", threshold=1.0, top_k=1)
    assert_alike(step, with_config(step, replace(step.config, policy="static")))


def assert_alike(one: Step, other: Step) -> None:
    mine, its = decide(one), decide(other)
    assert as_lists(mine.trees) == as_lists(its.trees)
    assert mine.forwards == its.forwards
