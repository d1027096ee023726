# SPDX-License-Identifier: Apache-2.0
"""Order and admission: at once as layer by layer, and one order for every budget."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.core.kit import as_lists, randoms
from tests.core.steps import SMALL, Outcome, Step, decide, draft_batch, drafted_in_full, random_step
from vllm_echo.core.config import POLICIES
from vllm_echo.core.decision import Decision
from vllm_echo.core.draft import limit_requests
from vllm_echo.core.gate import layers_reached
from vllm_echo.core.schedule import admit_nodes, order_trees, schedule, step_size
from vllm_echo.core.tree import DraftTrees, OrderedTrees

NO_NODE = 2**63 - 1
# derandomize: the same examples in every run, so that a failure is nobody's bad luck.
many = settings(max_examples=60, deadline=None, derandomize=True)
policies = pytest.mark.parametrize("policy", POLICIES)


def decision_of(step: Step) -> Decision:
    return step.policy().decide(step.load, step.offer())


def at_once(step: Step) -> DraftTrees:
    """What comes of the step where all layers are drafted before anything is asked."""
    decision, full = decision_of(step), drafted_in_full(step)
    limits = layers_reached(full, limit_requests(draft_batch(step.limits), decision), decision)
    return schedule(full, limits, decision, step.config.num_speculative_tokens)


def assert_at_once_as_layer_by_layer(step: Step) -> Outcome:
    outcome, trees = decide(step), at_once(step)
    assert trees.num_nodes.tolist() == outcome.counts
    assert as_lists(trees) == as_lists(outcome.trees)
    return outcome


@policies
@many
@given(randoms)
def test_at_once_decides_as_layer_by_layer(policy: str, source: random.Random) -> None:
    """Catches a budget that is spent on what would never have been drafted, and an order that
    only a loop knows. Ties, -inf, caps of 0 and chains are among the steps."""
    assert_at_once_as_layer_by_layer(random_step(source, policy=policy))


@policies
@pytest.mark.parametrize("requests", [1, 256])
def test_one_request_and_a_crowd_are_decided_at_once_as_layer_by_layer(
    policy: str, requests: int
) -> None:
    spent = 0
    for seed in range(20 if requests == 1 else 6):
        step = random_step(random.Random(seed), [requests], policy=policy)
        spent += sum(assert_at_once_as_layer_by_layer(step).counts)
    assert spent > 0


def test_the_steps_above_hold_what_the_loop_would_not_have_drafted() -> None:
    """The comparison is worth what its examples exercise: in each, a rule stopped somebody whose
    deeper candidates would have been taken, had they counted."""
    for policy in ("echo", "goodput", "ddd"):
        differing = 0
        for seed in range(400):
            step = random_step(random.Random(seed), policy=policy, kind="distinct")
            decision, full = decision_of(step), drafted_in_full(step)
            limits = limit_requests(draft_batch(step.limits), decision)
            ask_nothing = replace(decision, thresholds=(None,) * decision.shape.max_depth)
            trees = schedule(full, limits, ask_nothing, step.config.num_speculative_tokens)
            differing += as_lists(trees) != as_lists(decide(step).trees)
        assert differing > 10, policy


def ordered(step: Step) -> tuple[OrderedTrees, Decision]:
    """The order of a step's candidates, as far as a loop with this budget has drafted them."""
    outcome, decision = decide(step), decision_of(step)
    most = step.config.num_speculative_tokens
    return order_trees(outcome.candidates, outcome.growth.limits, decision, most), decision


@policies
@many
@given(randoms)
def test_a_greater_budget_is_the_smaller_one_and_more(policy: str, source: random.Random) -> None:
    """The order does not depend on the budget: K + 1 gives one request one node more than K, and
    K itself gives what a step that had no more would have decided."""
    step = random_step(source, [0, 1, 2, 5, 9], policy=policy, transfer=True, budget=10**6)
    trees, decision = ordered(step)
    there = int((trees.keys < NO_NODE).sum())
    before = torch.zeros(len(step.limits), dtype=torch.int32)
    for budget in range(1, there + 2):
        counts = admit_nodes(trees, budget).num_nodes
        assert counts.sum() == min(budget, there)
        assert sorted((counts - before).tolist())[-1:] in ([], [int(budget <= there)])
        assert (counts >= before).all()
        before = counts
        if policy != "goodput" and budget % 3 == 1:
            smaller = decide(step, offer=replace(step.offer(), num_nodes=budget))
            assert smaller.counts == counts.tolist()
            assert as_lists(smaller.trees) == as_lists(admit_nodes(trees, budget))


@policies
@many
@given(randoms)
def test_never_more_than_the_budget_and_no_less_than_there_is(
    policy: str, source: random.Random
) -> None:
    """Without transfer, too: the caps of K_max bound what there is."""
    step = random_step(source, [*SMALL, 256], policy=policy)
    trees, decision = ordered(step)
    there = (trees.keys < NO_NODE).sum(dim=1)
    counts = admit_nodes(trees, step_size(trees, decision)).num_nodes
    assert int(counts.sum()) == min(step_size(trees, decision), int(there.sum()))
    assert int(counts.sum()) <= decision.budget
    assert (counts <= there).all()
    limits = decide(step).growth.limits
    assert (there <= limits.caps.clamp(min=0)).all()
    keys = trees.keys
    assert (keys.diff(dim=1)[keys[:, 1:] < NO_NODE] > 0).all(), "keys of a request must ascend"
    nodes = keys[keys < NO_NODE]
    assert nodes.unique().shape == nodes.shape and (nodes >= 0).all()


def test_what_a_gate_cuts_off_is_no_candidate_of_width() -> None:
    """A request that is cut at its root keeps its first layer only, however good what lies below
    it would have been: catches a device that spends the budget on what ECHO never drafts."""
    source = random.Random(3)
    cut_short = 0
    for _ in range(100):
        step = random_step(source, policy="echo", kind="distinct", width=True, transfer=True)
        step = replace(step, budget=10**6)
        trees, outcome = at_once(step), decide(step)
        for r in outcome.growth.truncated.nonzero().flatten().tolist():
            count = int(trees.num_nodes[r])
            if count > 0:
                cut_short += 1
                assert trees.depths[r, :count].max() <= outcome.layers[r] + 1
    assert cut_short > 10


@pytest.mark.parametrize("policy", ["static", "echo", "goodput"])
def test_the_order_of_many_requests_is_found_without_the_budget(policy: str) -> None:
    """What step t orders, step t + 1 can admit with a budget that only it knows."""
    step = random_step(random.Random(5), [256], policy=policy, transfer=True, budget=10**6)
    trees, _ = ordered(step)
    again, _ = ordered(replace(step, budget=10**5))
    assert torch.equal(trees.keys, again.keys)
    assert int(admit_nodes(trees, 100).num_nodes.sum()) == 100
