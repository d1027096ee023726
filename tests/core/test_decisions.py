# SPDX-License-Identifier: Apache-2.0
"""draft -> gate -> schedule: what must hold of every step's trees, whatever the head says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import (
    CPU,
    TableHead,
    as_lists,
    decide,
    draft_batch,
    nodes_as_lists,
    path_scores,
    random_step,
)
from vllm_echo.config import EchoConfig
from vllm_echo.pipeline import EchoPipeline
from vllm_echo.reference import draft as reference
from vllm_echo.reference.draft import Limits

# derandomize: the same examples in every run, so that a failure is nobody's bad luck.
many = settings(max_examples=100, deadline=None, derandomize=True)
randoms = st.randoms(use_true_random=False)


@many
@given(randoms)
def test_tensors_decide_exactly_as_the_reference(source: random.Random) -> None:
    """Catches any slip of vectorisation: gathers, tie order, renumbered parents, budgets."""
    step = random_step(source)
    drafted, budget_left = reference.grow_trees(
        step.children(), step.limits, step.config, step.budget
    )
    trees = reference.propose_trees(step.children(), step.limits, step.config, step.budget)

    decision = decide(step)

    assert decision.candidates.num_layers.tolist() == [request.num_layers for request in drafted]
    assert decision.candidates.truncated.tolist() == [request.truncated for request in drafted]
    assert decision.budget_left == budget_left
    assert as_lists(decision.trees) == nodes_as_lists(trees)


def test_random_steps_reach_every_kind_of_decision() -> None:
    """The properties in this file are worth what their examples exercise."""
    seen = set()
    for seed in range(300):
        step = random_step(random.Random(seed), policy="echo")
        decision = decide(step)
        layers = decision.candidates.num_layers.tolist()
        counts = decision.trees.num_nodes.tolist()
        seen |= {"truncated"} if any(decision.candidates.truncated) else set()
        seen |= {"width"} if sum(counts) > sum(layers) else set()
        seen |= {"deep"} if max(layers, default=0) >= 4 else set()
        seen |= {"out of budget"} if 0 < step.budget == sum(counts) else set()
        seen |= {"no request"} if not step.limits else set()
        unequal = len({c for c, limit in zip(counts, step.limits, strict=True) if limit[0]}) > 1
        seen |= {"unequal trees"} if unequal else set()
    assert seen == {"truncated", "width", "deep", "out of budget", "no request", "unequal trees"}


@many
@given(randoms)
def test_neither_the_step_nor_a_request_gets_more_than_its_cap(source: random.Random) -> None:
    """Catches the overshoot of the published pseudo-code, which subtracts whole layers."""
    step = random_step(source)
    counts = decide(step).trees.num_nodes.tolist()
    assert sum(counts) <= step.budget
    for count, limit in zip(counts, step.limits, strict=True):
        assert 0 <= count <= limit.max_nodes


@many
@given(randoms)
def test_every_tree_is_closed_and_in_descending_path_score(source: random.Random) -> None:
    """Catches trees that lose a parent when cut, and paths ranked by a wrong score."""
    step = random_step(source)
    trees = decide(step).trees
    trees.validate()
    for request, tree in enumerate(as_lists(trees)):
        scores = path_scores(step.children(), request, tree)
        assert scores == sorted(scores, reverse=True)
        assert all(score > -float("inf") for score in scores), "a forbidden child was taken"


@many
@given(randoms)
def test_any_cut_from_the_end_of_a_tree_leaves_a_tree(source: random.Random) -> None:
    """The engine may schedule fewer nodes than were drafted (token budget, grammar)."""
    trees = decide(random_step(source)).trees
    for keep in range(trees.tokens.shape[1]):
        trees.num_nodes.clamp_(max=trees.tokens.shape[1] - keep)
        trees.validate()


@many
@given(randoms)
def test_width_is_bought_only_when_nobody_can_go_deeper(source: random.Random) -> None:
    """A node beyond the granted layers means: each request was cut by a gate, or is at its last
    layer, its last node, or without draft slots below depth 1."""
    step = random_step(source, policy="echo")
    decision = decide(step)
    layers = decision.candidates.num_layers.tolist()
    truncated = decision.candidates.truncated.tolist()
    counts = decision.trees.num_nodes.tolist()
    assert all(count >= layer for count, layer in zip(counts, layers, strict=True))
    if sum(counts) == sum(layers):
        return
    for request, limit in enumerate(step.limits):
        most_layers = min(limit.max_nodes, step.config.max_depth if limit.can_expand else 1)
        assert truncated[request] or layers[request] == most_layers


@many
@given(randoms)
def test_truncated_requests_are_widened_before_all_others(source: random.Random) -> None:
    """If an untruncated request got width, every truncated one has all that it can take."""
    step = random_step(source, policy="echo")
    decision = decide(step)
    layers = decision.candidates.num_layers.tolist()
    truncated = decision.candidates.truncated.tolist()
    counts = decision.trees.num_nodes.tolist()
    possible = decision.candidates.scores.isfinite().sum(dim=1).tolist()
    others_got_width = any(
        count > layer and not cut
        for count, layer, cut in zip(counts, layers, truncated, strict=True)
    )
    if others_got_width:
        for request in (r for r, cut in enumerate(truncated) if cut):
            assert counts[request] == min(possible[request], step.limits[request].max_nodes)


@many
@given(randoms)
def test_no_budget_is_left_while_a_candidate_could_use_it(source: random.Random) -> None:
    step = random_step(source)
    decision = decide(step)
    counts = decision.trees.num_nodes.tolist()
    possible = decision.candidates.scores.isfinite().sum(dim=1).tolist()
    if sum(counts) < step.budget:
        for request, limit in enumerate(step.limits):
            assert counts[request] == min(possible[request], limit.max_nodes)


@many
@given(randoms)
def test_chain_only_requests_get_chains(source: random.Random) -> None:
    """One grammar mask a position: a second child would be judged by its sibling's mask."""
    step = random_step(source)
    for limit, tree in zip(step.limits, as_lists(decide(step).trees), strict=True):
        if limit.chain_only or step.config.policy == "chain":
            assert [(parent, depth) for _, parent, depth in tree] == [
                (index - 1, index + 1) for index in range(len(tree))
            ]


@many
@given(randoms)
def test_who_is_truncated_or_gets_no_budget_is_drafted_for_no_more(source: random.Random) -> None:
    """The saving that sparse gates promise: a layer's forward holds only who was granted it."""
    step = random_step(source, policy="echo")
    decision = decide(step)
    for request in range(len(step.limits)):
        forwards = [depth for depth, asked in enumerate(decision.forwards, 1) if request in asked]
        layers = int(decision.candidates.num_layers[request])
        assert forwards == list(range(1, len(forwards) + 1)), "a request came back after a pause"
        assert len(forwards) <= layers
        if decision.candidates.truncated[request]:
            assert len(forwards) == layers, "truncated without having been looked at"


@many
@given(randoms)
def test_no_layer_is_drafted_once_the_budget_is_spent(source: random.Random) -> None:
    """Catches a forward whose candidates nobody can pay for."""
    step = random_step(source, policy="echo")
    decision = decide(step)
    layers = decision.candidates.num_layers.tolist()
    for depth in range(1, len(decision.forwards) + 1):
        spent = sum(min(count, depth) for count in layers)
        assert spent < step.budget


@many
@given(randoms)
def test_nobody_is_drafted_for_deeper_than_its_cap(source: random.Random) -> None:
    """A node at depth d needs d nodes of the request's own, so a layer below depth max_nodes is
    a forward whose every candidate is thrown away."""
    step = random_step(source)
    decision = decide(step)
    for depth, asked in enumerate(decision.forwards, start=1):
        for request in asked:
            assert depth + 1 <= step.limits[request].max_nodes


@many
@given(randoms, st.integers(0, 8), st.booleans())
def test_a_request_near_its_limit_stops_no_other(
    source: random.Random, place: int, can_expand: bool
) -> None:
    """Catches batch-wide shortcuts: one request without room must not end the others' drafting."""
    step = random_step(source, budget=2**31 - 1)
    place = min(place, len(step.limits))
    crowd = (*step.limits[:place], Limits(0, can_expand), *step.limits[place:])
    original = step.children()

    def shifted(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        return original(request - (request > place), path)

    alone = as_lists(decide(step).trees)
    together = as_lists(decide(type(step)(**{**vars(step), "limits": crowd}), shifted).trees)
    assert together == [*alone[:place], [], *alone[place:]]


@pytest.mark.parametrize(
    ("limits", "nodes"),
    [
        (Limits(0), 0),
        (Limits(1), 1),
        (Limits(1, can_expand=False), 1),
        (Limits(8, can_expand=False), 3),
        (Limits(8, can_expand=False, chain_only=True), 1),
    ],
)
def test_a_request_near_its_limit_keeps_what_it_can_have(limits: Limits, nodes: int) -> None:
    config = EchoConfig(gates=())
    step = random_step(random.Random(5), kind="plain", limits=(limits, Limits(8)), budget=100)
    counts = decide(type(step)(**{**vars(step), "config": config})).trees.num_nodes.tolist()
    assert counts == [nodes, 8]


@many
@given(randoms)
def test_the_pipeline_stores_by_slot_what_it_proposes(source: random.Random) -> None:
    step = random_step(source)
    if step.budget == 0:
        return  # k_max is at least 1
    config = EchoConfig(**{**vars(step.config), "k_max": step.budget})
    pipeline = EchoPipeline(config, 2 * len(step.limits) + 1, CPU)
    slots = draft_batch([Limits(2 * r) for r in range(len(step.limits))]).max_nodes.long()
    head = TableHead(step.children(), len(step.limits), pipeline.policy)

    trees = pipeline.propose_trees(head, draft_batch(step.limits), slots)

    assert as_lists(trees) == as_lists(decide(step).trees)
    read = pipeline.table.read(slots, trees.tokens, trees.num_nodes)
    assert as_lists(read) == as_lists(trees)
    others = [slot for slot in range(pipeline.table.num_slots) if slot not in slots.tolist()]
    assert not pipeline.table.num_nodes[others].any()


@pytest.mark.parametrize("policy", ["echo", "static", "chain"])
@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_whose_draft_logits_are_nan_harms_nobody(
    policy: str, broken: float, depth: int
) -> None:
    """A head that overflows in half precision gives NaN for one request. That request may lose
    its draft; its tree must stay a tree, and the others' must stay what they were."""
    step = random_step(random.Random(3), kind="plain", limits=(Limits(8),) * 3, budget=100)
    step = type(step)(**{**vars(step), "config": EchoConfig(policy=policy, gates=())})
    original = step.children()

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        found = original(request, path)
        if request != 1 or len(path) != depth:
            return found
        return [(token, broken) for token, _ in found]

    trees = decide(step, children).trees
    trees.validate()
    healthy = as_lists(decide(step).trees)
    assert [as_lists(trees)[r] for r in (0, 2)] == [healthy[r] for r in (0, 2)]
    assert all(depth_of <= depth for _, _, depth_of in as_lists(trees)[1]), "a node without a score"
