# SPDX-License-Identifier: Apache-2.0
"""draft -> gate -> schedule: what must hold of every step's trees, whatever the head says."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.core.kit import CPU, as_lists, nodes_as_lists, randoms
from tests.core.steps import (
    BY_DRAFT,
    KINDS,
    Outcome,
    Step,
    TableHead,
    decide,
    draft_batch,
    path_scores,
    random_step,
    scored_children,
)
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import POLICIES, EchoConfig
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.reference import draft as reference
from vllm_echo.reference.draft import Limits

# derandomize: the same examples in every run, so that a failure is nobody's bad luck.
many = settings(max_examples=100, deadline=None, derandomize=True)


def assert_decided_as_the_reference(step: Step) -> Outcome:
    offer = step.offer()
    given = scored_children(step), step.limits, step.config, offer, step.load
    drafted = reference.grow_trees(*given)
    decision = decide(step)
    assert decision.caps == drafted.caps
    assert decision.layers == [request.num_layers for request in drafted.requests]
    assert decision.truncated == [request.truncated for request in drafted.requests]
    assert decision.growth.budget == drafted.budget
    assert as_lists(decision.trees) == nodes_as_lists(reference.propose_trees(*given))
    return decision


@many
@given(randoms)
def test_tensors_decide_exactly_as_the_reference(source: random.Random) -> None:
    """Catches any slip of vectorisation: gathers, tie order, renumbered parents, budgets."""
    # Ties of calibrated scores are ties by accident of rounding, and exp is none of ours.
    policy = source.choice(POLICIES)
    kind = "distinct" if policy == "goodput" else source.choice(KINDS)
    assert_decided_as_the_reference(random_step(source, policy=policy, kind=kind))


def test_the_reference_compares_what_goodput_can_decide() -> None:
    """The comparison above is worth what its examples exercise."""
    seen = set()
    for seed in range(250):
        step = random_step(random.Random(seed), policy="goodput", kind="distinct")
        decision = assert_decided_as_the_reference(step)
        offer = step.offer()
        possible = sum(min(n, cap) for n, cap in zip(decision.possible, decision.caps, strict=True))
        seen |= {"does not pay"} if offer.num_nodes == 0 != step.budget else set()
        seen |= {"some nodes pay"} if 0 < sum(decision.counts) < possible else set()
        seen |= {"deep"} if len(decision.forwards) >= 3 else set()
        seen |= {"stops"} if 0 < len(decision.forwards) < step.config.max_depth - 1 else set()
        seen |= {"some stop"} if len(set(map(len, decision.forwards))) > 1 else set()
    assert seen == {"does not pay", "some nodes pay", "deep", "stops", "some stop"}


@many
@given(randoms)
def test_neither_the_step_nor_a_request_gets_more_than_its_cap(source: random.Random) -> None:
    """Catches the overshoot of the published pseudo-code, which subtracts whole layers."""
    step = random_step(source)
    counts = decide(step).counts
    assert sum(counts) <= step.offer().num_nodes
    if step.budget != "auto":
        assert step.offer().num_nodes <= step.budget
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
        scores = path_scores(scored_children(step), request, tree)
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
def test_no_budget_is_left_while_a_candidate_could_use_it(source: random.Random) -> None:
    """Of the policies that spend all they are given; goodput keeps what does not pay."""
    step = random_step(source, policy=BY_DRAFT, width=True, transfer=True)
    decision = decide(step)
    if sum(decision.counts) < step.offer().num_nodes:
        for count, possible, limit in zip(
            decision.counts, decision.possible, step.limits, strict=True
        ):
            assert count == min(possible, limit.max_nodes)


@many
@given(randoms)
def test_without_transfer_nobody_uses_what_another_leaves(source: random.Random) -> None:
    """An even share each, the odd nodes to the first requests; catches caps that one of the
    two phases forgets."""
    step = random_step(source, transfer=False)
    budget = step.offer().num_nodes
    drafted = [r for r, limit in enumerate(step.limits) if limit.max_nodes]
    counts = decide(step).counts
    for place, request in enumerate(drafted):
        assert counts[request] <= budget // len(drafted) + (place < budget % len(drafted))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_of_0_drafts_nothing(policy: str) -> None:
    """Catches a first node that is given away unasked."""
    for seed in range(30):
        decision = decide(random_step(random.Random(seed), policy=policy, budget=0))
        assert not any(decision.counts)
        assert decision.forwards == []


@many
@given(randoms)
def test_forwards_and_what_they_held_are_counted(source: random.Random) -> None:
    """Catches a cost that is reported for another step than the one that ran."""
    step = random_step(source)
    decision = decide(step)
    widths = step.policy().shape.frontier_widths
    assert decision.growth.num_forwards == len(decision.forwards)
    assert decision.growth.num_expanded == sum(
        len(asked) * width for asked, width in zip(decision.forwards, widths, strict=False)
    )


@many
@given(randoms)
def test_the_pipeline_stores_by_slot_what_it_proposes(source: random.Random) -> None:
    step = random_step(source)
    config = replace(step.config, k_max=step.budget)
    pipeline = EchoPipeline(config, 2 * len(step.limits) + 1, CPU)
    slots = draft_batch([Limits(2 * r) for r in range(len(step.limits))]).max_nodes.long()
    head = TableHead(step.children(), len(step.limits), pipeline.policy)

    trees = pipeline.propose_trees(
        head, draft_batch(step.limits), slots, step.offer(), step.load
    ).trees

    assert as_lists(trees) == as_lists(decide(step).trees)
    read = pipeline.table.read(slots, trees.tokens, trees.num_nodes)
    assert as_lists(read) == as_lists(trees)
    others = [slot for slot in range(pipeline.table.num_slots) if slot not in slots.tolist()]
    assert not pipeline.table.num_nodes[others].any()


def test_options_that_change_leave_the_last_steps_trees() -> None:
    """Catches a tree table that is made anew while requests still have trees in it."""
    step = random_step(random.Random(5), policy="static", limits=(Limits(4),) * 3, budget=12)
    pipeline = EchoPipeline(step.config, 3, CPU)
    head = TableHead(step.children(), 3, pipeline.policy)
    slots = draft_batch([Limits(r) for r in range(3)]).max_nodes.long()
    trees = pipeline.propose_trees(
        head, draft_batch(step.limits), slots, step.offer(), step.load
    ).trees
    assert trees.num_nodes.all()

    pipeline.set_options(EchoConfig(policy="chain", k_max=0))

    assert pipeline.policy.offer(step.load) == Offer(0)
    assert pipeline.policy.shape.top_k == 1
    read = pipeline.table.read(slots, trees.tokens, trees.num_nodes)
    assert as_lists(read) == as_lists(trees)
