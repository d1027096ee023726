# SPDX-License-Identifier: Apache-2.0
"""Policies: their shapes, and the ones that must coincide."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import Step, as_lists, decide, random_step
from vllm_echo.config import EchoConfig, Gate
from vllm_echo.policies import _frontier_widths, make_policy
from vllm_echo.reference import draft as reference
from vllm_echo.reference.draft import Limits

PLENTY = 2**31 - 1


@given(st.integers(1, 255), st.integers(1, 255), st.integers(1, 40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_frontiers_fit_the_draft_slots(num_nodes: int, max_depth: int, top_k: int) -> None:
    """Catches draft KV beyond what the engine reserved, and a layer that nobody expands."""
    max_depth = min(num_nodes, max_depth)
    widths = _frontier_widths(max_depth, top_k, num_nodes)
    assert list(widths) == reference.frontier_widths(max_depth, top_k, num_nodes)
    assert len(widths) == max_depth - 1
    assert sum(widths) <= num_nodes - 1
    assert all(1 <= width <= top_k for width in widths)


@pytest.mark.parametrize(
    ("max_depth", "top_k", "num_nodes", "widths"),
    [
        (1, 1, 1, ()),
        (1, 16, 1, ()),
        (1, 16, 255, ()),
        (2, 3, 2, (1,)),
        (8, 3, 8, (1, 1, 1, 1, 1, 1, 1)),
        (6, 3, 8, (3, 1, 1, 1, 1)),
        (4, 3, 255, (3, 3, 3)),
        (255, 4, 255, (1,) * 254),
    ],
)
def test_frontier_widths_at_the_edges(
    max_depth: int, top_k: int, num_nodes: int, widths: tuple[int, ...]
) -> None:
    assert _frontier_widths(max_depth, top_k, num_nodes) == widths


def test_draft_slots_of_a_layer_follow_those_above() -> None:
    policy = make_policy(EchoConfig(num_speculative_tokens=12, max_depth=4, top_k=3))
    assert policy.frontier_widths == (3, 3, 3)
    assert [policy.first_slot(depth) for depth in (1, 2, 3)] == [0, 3, 6]
    assert policy.num_draft_slots == 9


def with_config(step: Step, config: EchoConfig) -> Step:
    return Step(config, step.limits, step.seed, step.kind, step.budget)


@pytest.mark.parametrize("depth", [1, 2, 5, 12])
@pytest.mark.parametrize("budget", [0, 1, 4, 9, PLENTY])
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
        step = random_step(random.Random(seed), num_speculative_tokens=12, budget=PLENTY)
        expected = as_lists(decide(with_config(step, chain)).trees)
        assert as_lists(decide(with_config(step, echo)).trees) == expected
        assert any(expected) or not any(limit.max_nodes for limit in step.limits)


@pytest.mark.parametrize("policy", ["echo", "static", "chain"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_depth_1_drafts_the_roots_children_only(policy: str, top_k: int) -> None:
    """Catches the crash of trees without a second layer."""
    config = EchoConfig(
        num_speculative_tokens=8, policy=policy, max_depth=1, target_depth=1, top_k=top_k, gates=()
    )
    decision = decide(Step(config, (Limits(8), Limits(2), Limits(0)), 1, "plain", PLENTY))
    width = 1 if policy == "chain" else top_k
    assert decision.forwards == []
    assert decision.trees.num_nodes.tolist() == [width, min(width, 2), 0]
    assert all(depth == 1 for tree in as_lists(decision.trees) for _, _, depth in tree)


def test_static_takes_the_best_nodes_whatever_the_gates_say() -> None:
    gates = (Gate(0, 1.0),)
    shape = {"num_speculative_tokens": 10, "max_depth": 4, "target_depth": 3, "top_k": 3}
    closed = EchoConfig(policy="static", gates=gates, **shape)
    opened = EchoConfig(policy="static", gates=(), **shape)
    step = Step(closed, (Limits(10),) * 3, 7, "plain", PLENTY)
    decision = decide(step)
    assert decision.trees.num_nodes.tolist() == [10] * 3
    assert decision.candidates.depths.max() == 3, "target_depth ends the fixed shapes"
    assert as_lists(decision.trees) == as_lists(decide(with_config(step, opened)).trees)


def test_closed_gates_cost_a_poor_drafter_all_but_one_draft_layer() -> None:
    """With a head that knows nothing, nothing is drafted below the first layer."""
    config = EchoConfig(gates=(Gate(0, 1.0),))
    decision = decide(Step(config, (Limits(8),) * 4, 7, "plain", PLENTY))
    assert decision.forwards == []
    assert decision.candidates.num_layers.tolist() == [0] * 4


def test_low_load_turns_depth_into_width_and_high_load_moves_budget() -> None:
    """One rule, both regimes: request 0 is cut at its root, request 1 never."""

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        best = -2.0 if request == 0 else -0.125
        return [(token, best - token) for token in range(8)]

    config = EchoConfig(gates=(Gate(0, 0.2),), max_depth=6, top_k=3)
    limits = (Limits(8), Limits(8))

    def counts(budget: int) -> list[int]:
        return decide(Step(config, limits, 0, "plain", budget), children).trees.num_nodes.tolist()

    assert counts(6) == [0, 6], "the budget of the truncated request moved"
    assert counts(9) == [3, 6], "what depth could not use widens the truncated request first"
    assert counts(11) == [3, 8]
