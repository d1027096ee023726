# SPDX-License-Identifier: Apache-2.0
"""Steps of up to 256 requests and budgets of up to 2048 nodes, by every policy."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists, nodes_as_lists
from tests.core.steps import BY_DRAFT, GATED, UNLIMITED, Step, decide, random_step, scored_children
from vllm_echo.core.config import POLICIES
from vllm_echo.reference import draft as reference

few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32)
numbers = st.sampled_from([1, 2, 17, 64, 128, 255, 256, 256])
budgets = st.sampled_from([0, 1, 2, 31, 64, 255, 256, 257, 1000, 2048, "auto"])
policies = pytest.mark.parametrize("policy", POLICIES)


@policies
@few
@given(seeds, numbers, budgets)
def test_no_crowd_exceeds_its_budget(
    policy: str, seed: int, requests: int, budget: int | str
) -> None:
    """The cap, trees, and the limits of each request, whatever the head says."""
    step = random_step(random.Random(seed), [requests], policy=policy, budget=budget)
    decision = decide(step)
    counts, trees = decision.counts, decision.trees
    assert len(counts) == requests
    most = step.offer().num_nodes
    assert sum(counts) <= most
    if budget != "auto":
        assert most <= budget
    trees.validate()
    for count, tree, limit in zip(counts, as_lists(trees), step.limits, strict=True):
        assert count <= limit.max_nodes
        deepest = limit.max_depth if limit.can_expand else 1
        assert all(depth <= deepest for _, _, depth in tree)
        if limit.chain_only:
            assert [parent for _, parent, _ in tree] == list(range(-1, len(tree) - 1))
    if not step.config.transfer:
        drafted = sum(limit.max_nodes > 0 for limit in step.limits)
        assert max(counts) <= -(-most // max(1, drafted))
    if policy in GATED and not step.config.width:
        assert counts == decision.layers
    if budget == 0:
        assert decision.forwards == []


@policies
@few
@given(seeds, numbers, budgets)
def test_a_crowd_is_decided_as_by_the_reference(
    policy: str, seed: int, requests: int, budget: int | str
) -> None:
    """Catches sizes at which a shortcut begins: words of bits, blocks of threads, whole rounds."""
    kind = "distinct" if policy == "goodput" else "tied"
    step = random_step(random.Random(seed), [requests], policy=policy, budget=budget, kind=kind)
    expected = reference.propose_trees(
        scored_children(step), step.limits, step.config, step.offer(), step.load
    )
    assert as_lists(decide(step).trees) == nodes_as_lists(expected)


def permuted(step: Step, order: list[int]) -> list[list[tuple[int, int, int]]]:
    """The trees when request ``order[i]`` stands at place i, put back in their old order."""
    original = step.children()

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        return original(order[request], path)

    other = replace(step, limits=tuple(step.limits[request] for request in order))
    trees = as_lists(decide(other, children).trees)
    return [trees[order.index(request)] for request in range(len(order))]


@policies
@few
@given(seeds, numbers)
def test_places_in_the_batch_decide_nothing_but_ties(policy: str, seed: int, requests: int) -> None:
    """Catches a request that gets its neighbour's budget, confidence or nodes. Odd nodes of even
    shares go by place, so there is budget for all where shares are even."""
    source = random.Random(seed)
    by_place = policy in BY_DRAFT and policy not in GATED
    budget = UNLIMITED if by_place else source.choice([requests, 3 * requests, 1000, "auto"])
    step = random_step(
        source, [requests], policy=policy, budget=budget, kind="distinct", transfer=True
    )
    order = source.sample(range(requests), requests)
    assert permuted(step, order) == as_lists(decide(step).trees)


def test_places_decide_where_the_test_above_looks_away() -> None:
    """Ties and odd nodes really go by place; otherwise the exceptions above would hide a bug."""
    ways = [{"policy": "static", "kind": "distinct"}, {"policy": "echo", "kind": "tied"}]
    for way in ways:
        differing = 0
        for seed in range(20):
            source = random.Random(seed)
            step = random_step(source, [17], budget=20, transfer=True, **way)
            order = source.sample(range(17), 17)
            differing += permuted(step, order) != as_lists(decide(step).trees)
        assert differing > 5


def test_crowds_reach_every_kind_of_decision() -> None:
    """The properties in this file are worth what their examples exercise."""
    seen = set()
    for seed in range(40):
        source = random.Random(seed)
        step = random_step(source, [100], policy="echo", budget=source.choice([31, 257, 2048]))
        decision = decide(step)
        seen |= {"truncated"} if any(decision.truncated) else set()
        seen |= {"width"} if sum(decision.counts) > sum(decision.layers) else set()
        seen |= {"out of budget"} if sum(decision.counts) == step.budget else set()
        seen |= {"budget left"} if sum(decision.counts) < step.budget else set()
        seen |= {"deep"} if max(decision.layers) >= 4 else set()
    assert seen == {"truncated", "width", "out of budget", "budget left", "deep"}
    pays = [
        decide(random_step(random.Random(seed), [100], policy="goodput", budget=2048))
        for seed in range(40)
    ]
    assert 5 < sum(sum(decision.counts) > 0 for decision in pays) < 40
