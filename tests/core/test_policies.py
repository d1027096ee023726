# SPDX-License-Identifier: Apache-2.0
"""Policies: their shapes, their budgets, and their rules by example."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists
from tests.core.machines import MACHINE
from tests.core.steps import BY_DRAFT, GATED, UNLIMITED, Step, decide
from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.budget import NOTHING, ElasticBudget, Offer
from vllm_echo.core.config import MAX_NODES_PER_STEP, EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.policies import make_policy
from vllm_echo.core.schedule import cap_nodes
from vllm_echo.core.shape import TreeShape
from vllm_echo.reference import draft as reference
from vllm_echo.reference.draft import Limits
from vllm_echo.reference.schedule import to_float32

many = settings(max_examples=60, deadline=None, derandomize=True)


@given(st.integers(1, 255), st.integers(1, 255), st.integers(1, 40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_frontiers_fit_the_draft_slots(num_nodes: int, max_depth: int, top_k: int) -> None:
    """Catches draft KV beyond what the engine reserved, and a layer that nobody expands."""
    max_depth = min(num_nodes, max_depth)
    widths = TreeShape.within(max_depth, top_k, num_nodes).frontier_widths
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
    assert TreeShape.within(max_depth, top_k, num_nodes).frontier_widths == widths


def test_draft_slots_of_a_layer_follow_those_above() -> None:
    shape = make_policy(
        EchoConfig(policy="echo", k_max=32, num_speculative_tokens=12, max_depth=4, top_k=3)
    ).shape
    assert shape.frontier_widths == (3, 3, 3)
    assert [shape.first_slot(depth) for depth in (1, 2, 3)] == [0, 3, 6]
    assert shape.num_draft_slots == 9


@pytest.mark.parametrize("policy", BY_DRAFT)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_depth_1_drafts_the_roots_children_only(policy: str, top_k: int) -> None:
    """Catches the crash of trees without a second layer."""
    config = EchoConfig(
        num_speculative_tokens=8, policy=policy, max_depth=1, target_depth=1, top_k=top_k, gates=()
    )
    decision = decide(Step(config, (Limits(8), Limits(2), Limits(0)), 1, "plain", UNLIMITED))
    width = 1 if policy == "chain" else top_k
    assert decision.forwards == []
    assert decision.counts == [width, min(width, 2), 0]
    assert all(depth == 1 for tree in as_lists(decision.trees) for _, _, depth in tree)


def test_static_takes_the_best_nodes_whatever_the_gates_say() -> None:
    gates = (Gate(0, 1.0),)
    shape = {"num_speculative_tokens": 10, "max_depth": 4, "target_depth": 3, "top_k": 3}
    closed = EchoConfig(policy="static", gates=gates, **shape)
    opened = EchoConfig(policy="static", gates=(), **shape)
    step = Step(closed, (Limits(10),) * 3, 7, "plain", UNLIMITED)
    decision = decide(step)
    assert decision.counts == [10] * 3
    assert decision.candidates.depths.max() == 3, "target_depth ends the fixed shapes"
    assert as_lists(decision.trees) == as_lists(decide(replace(step, config=opened)).trees)


def test_closed_gates_cost_a_poor_drafter_all_but_one_draft_layer() -> None:
    """With a head that knows nothing, nothing is drafted below the first layer."""
    config = EchoConfig(policy="echo", k_max=32, gates=(Gate(0, 1.0),))
    decision = decide(Step(config, (Limits(8),) * 4, 7, "plain", UNLIMITED))
    assert decision.forwards == []
    assert decision.layers == [0] * 4


def test_low_load_turns_depth_into_width_and_high_load_moves_budget() -> None:
    """One rule, both regimes: request 0 is cut at its root, request 1 never."""

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        best = -2.0 if request == 0 else -0.125
        return [(token, best - token) for token in range(8)]

    config = EchoConfig(policy="echo", k_max=32, gates=(Gate(0, 0.2),), max_depth=6, top_k=3)
    limits = (Limits(8), Limits(8))

    def counts(budget: int) -> list[int]:
        return decide(Step(config, limits, 0, "plain", budget), children).counts

    assert counts(6) == [0, 6], "the budget of the truncated request moved"
    assert counts(9) == [3, 6], "what depth could not use widens the truncated request first"
    assert counts(11) == [3, 8]


def test_a_beam_is_followed_while_it_holds_more_than_the_threshold() -> None:
    """Dynamic depth looks at the nodes to be expanded together, from target_depth on: request 0's
    two best hold 0.25 of the probability at depth 2, request 1's hold 0.5."""

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        first = -1.0 if request else -2.0
        return [(token, to_float32((first - 99 * (token > 1)) * math.log(2))) for token in range(8)]

    def forwards(threshold: float, target_depth: int) -> list[list[int]]:
        config = EchoConfig(
            num_speculative_tokens=9,
            policy="ddd",
            max_depth=4,
            target_depth=target_depth,
            top_k=2,
            gates=(),
            threshold=threshold,
        )
        step = Step(config, (Limits(9),) * 2, 0, "plain", UNLIMITED)
        return decide(step, children).forwards

    # Two children of 1/4 (of 1/2) each: the beam holds 1/2 (1), then 2 of 1/16 (of 1/4): 1/8 (1/2).
    assert forwards(0.1, target_depth=1) == [[0, 1], [0, 1], [1]]
    assert forwards(0.2, target_depth=1) == [[0, 1], [1], [1]]
    assert forwards(0.6, target_depth=1) == [[1]]
    assert forwards(0.6, target_depth=2) == [[0, 1]], "not asked before target_depth"
    assert forwards(0.6, target_depth=4) == [[0, 1]] * 3, "the last layer needs no decision"


def test_without_transfer_the_confident_get_no_more_than_the_others() -> None:
    """What request 0 leaves at its closed gate is lost, where it would have moved."""

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        best = -2.0 if request == 0 else -0.125
        return [(token, best - token) for token in range(8)]

    config = EchoConfig(policy="echo", k_max=32, gates=(Gate(0, 0.2),), max_depth=6, top_k=1)
    limits = (Limits(8), Limits(8), Limits(0), Limits(2))

    def counts(transfer: bool, budget: int) -> list[int]:
        step = Step(replace(config, transfer=transfer), limits, 0, "plain", budget)
        return decide(step, children).counts

    assert counts(True, 8) == [0, 6, 0, 2]
    assert counts(False, 8) == [1, 3, 0, 2], "three are drafted for: 3, 3 and 2 nodes"
    assert counts(False, 2) == [1, 1, 0, 0]


def test_without_width_a_closed_gate_leaves_its_nodes_unspent() -> None:
    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        best = -2.0 if request == 0 else -0.125
        return [(token, best - token) for token in range(8)]

    config = EchoConfig(
        policy="echo", k_max=32, gates=(Gate(0, 0.2),), max_depth=6, top_k=3, width=False
    )
    step = Step(config, (Limits(8), Limits(8)), 0, "plain", UNLIMITED)
    decision = decide(step, children)
    assert decision.counts == [0, 6]
    assert decision.growth.budget == UNLIMITED - 6


@pytest.mark.parametrize("policy", BY_DRAFT)
def test_every_policy_takes_its_budget_from_the_load_when_asked(policy: str) -> None:
    """`"k_max": "auto"`; catches a policy that spends a constant where the load decides."""
    auto = make_policy(EchoConfig(policy=policy, k_max="auto", profile=MACHINE))
    elastic = ElasticBudget(MACHINE, uncalibrated(), auto.shape, 8, UNLIMITED)
    offers = [auto.offer(StepLoad(requests)) for requests in (2, 8, 256)]
    assert offers == [elastic.offer(StepLoad(requests)) for requests in (2, 8, 256)]
    assert offers[0].num_nodes > 0 == offers[-1].num_nodes


@pytest.mark.parametrize("policy", GATED)
def test_an_elastic_budget_ends_where_a_layer_is_not_worth_its_forward(policy: str) -> None:
    """The offer knows what a forward costs, the gates do not. A constant K_max has no such end."""
    config = EchoConfig(policy=policy, gates=(), num_speculative_tokens=6, threshold=0.0)
    step = Step(config, (Limits(6),) * 3, 0, "plain", UNLIMITED)
    for depth in (1, 2, 4):
        decision = decide(step, offer=Offer(UNLIMITED, depth=depth))
        assert len(decision.forwards) == depth - 1
        assert decision.layers == [depth] * 3
    assert len(decide(step).forwards) == 5


@pytest.mark.parametrize("policy", BY_DRAFT)
def test_a_number_is_the_budget_whatever_a_step_costs(policy: str) -> None:
    """A profile beside a constant K_max decides nothing."""
    fixed = make_policy(EchoConfig(policy=policy, k_max=7, profile=MACHINE))
    assert fixed.offer(StepLoad(2)) == fixed.offer(StepLoad(256, 4096)) == Offer(7)


def test_goodput_may_spend_all_that_its_requests_can_have_once_anything_pays() -> None:
    """It looks at the candidates themselves; the curve's offer knows their average only, and says
    whether to draft at all. A number in the configuration is a cap beside it."""
    options = {"policy": "goodput", "num_speculative_tokens": 6, "profile": MACHINE}
    shape = make_policy(EchoConfig(**options)).shape
    elastic = ElasticBudget(MACHINE, uncalibrated(), shape, 6, UNLIMITED)
    for k_max, nodes in (("auto", [6, 12, 48, 0]), (10, [6, 10, 10, 0]), (0, [0] * 4)):
        policy = make_policy(EchoConfig(k_max=k_max, **options))
        offers = [policy.offer(StepLoad(requests)) for requests in (1, 2, 8, 256)]
        assert [offer.num_nodes for offer in offers] == nodes
        if k_max == "auto":
            expected = [elastic.offer(StepLoad(requests)) for requests in (1, 2, 8, 256)]
            assert [offer.price for offer in offers] == [offer.price for offer in expected]


@pytest.mark.parametrize(
    "options", [{"policy": "goodput", "k_max": 8}, {"policy": "echo", "k_max": "auto"}, {}]
)
def test_without_a_profile_nothing_is_drafted_by_who_needs_one(options: dict[str, str]) -> None:
    """The curve is measured while the engine starts, and steps run before it is there."""
    policy = make_policy(EchoConfig(**options))
    assert policy.offer(StepLoad(4)) == NOTHING
    assert policy.shape == make_policy(EchoConfig(profile=MACHINE, **options)).shape


def test_shares_of_the_greatest_k_max_do_not_overflow() -> None:
    """The one drafted request takes all of it; one before it, which is not drafted for, must not
    get "one node more" than 2147483647."""
    config = EchoConfig(policy="echo", k_max=MAX_NODES_PER_STEP, transfer=False)
    decision = make_policy(config).decide(StepLoad(2), Offer(MAX_NODES_PER_STEP))
    assert cap_nodes(torch.tensor([0, 8], dtype=torch.int32), decision).tolist() == [0, 8]
