# SPDX-License-Identifier: Apache-2.0
"""echo, dense and fixed-threshold: depth first, then width, whatever the head says."""

import random
from dataclasses import replace

from hypothesis import given, settings

from tests.core.kit import randoms
from tests.core.steps import GATED, decide, random_step
from vllm_echo.reference import draft as reference

# derandomize: the same examples in every run, so that a failure is nobody's bad luck.
many = settings(max_examples=100, deadline=None, derandomize=True)


def test_random_steps_reach_every_kind_of_decision() -> None:
    """The properties in this file are worth what their examples exercise."""
    seen = set()
    for seed in range(300):
        step = random_step(random.Random(seed), policy="echo")
        decision = decide(step)
        layers, counts = decision.layers, decision.counts
        seen |= {"truncated"} if any(decision.truncated) else set()
        seen |= {"width"} if sum(counts) > sum(layers) else set()
        seen |= {"deep"} if max(layers, default=0) >= 4 else set()
        seen |= {"out of budget"} if 0 < step.offer().num_nodes == sum(counts) else set()
        seen |= (
            {"ended by the offer"} if 1 < step.offer().depth == max(layers, default=0) else set()
        )
        seen |= {"no request"} if not step.limits else set()
        unequal = len({c for c, limit in zip(counts, step.limits, strict=True) if limit[0]}) > 1
        seen |= {"unequal trees"} if unequal else set()
    assert seen == {
        "truncated",
        "width",
        "deep",
        "out of budget",
        "ended by the offer",
        "no request",
        "unequal trees",
    }


@many
@given(randoms)
def test_width_is_bought_only_when_nobody_can_go_deeper(source: random.Random) -> None:
    """A node beyond the granted layers means: each request was cut by a gate, or is at its last
    layer, its last node, or without draft slots below depth 1."""
    step = random_step(source, policy=GATED)
    decision = decide(step)
    layers, counts = decision.layers, decision.counts
    assert all(count >= layer for count, layer in zip(counts, layers, strict=True))
    if sum(counts) == sum(layers):
        return
    for request, limit in enumerate(step.limits):
        end = min(step.offer().depth, step.config.max_depth)
        deepest = min(limit.max_depth, end) if limit.can_expand else 1
        most_layers = min(decision.caps[request], deepest)
        assert decision.truncated[request] or layers[request] == most_layers


@many
@given(randoms)
def test_truncated_requests_are_widened_before_all_others(source: random.Random) -> None:
    """If an untruncated request got width, every truncated one has all that it can take. The budget
    ends among the nodes of width, or nothing would have to wait."""
    plenty = random_step(source, [2, 5, 9], policy=GATED, width=True, transfer=True, budget=10**6)
    outcome = decide(plenty)
    depth = sum(outcome.layers)
    step = replace(plenty, budget=depth + source.randint(0, sum(outcome.counts) - depth))
    decision = decide(step, offer=replace(plenty.offer(), num_nodes=step.budget))
    counts, possible = decision.counts, decision.possible
    others_got_width = any(
        count > layer and not cut
        for count, layer, cut in zip(counts, decision.layers, decision.truncated, strict=True)
    )
    if others_got_width:
        for request in (r for r, cut in enumerate(decision.truncated) if cut):
            assert counts[request] == min(possible[request], decision.caps[request])


@many
@given(randoms)
def test_without_width_a_request_has_a_node_for_each_of_its_layers(source: random.Random) -> None:
    """Catches budget that is spent although the operator asked to save it."""
    decision = decide(random_step(source, policy=GATED, width=False))
    assert decision.counts == decision.layers


@many
@given(randoms)
def test_who_is_truncated_or_gets_no_budget_is_drafted_for_no_more(source: random.Random) -> None:
    """The saving that sparse gates promise: a layer's forward holds only who was granted it."""
    step = random_step(source, policy=GATED)
    decision = decide(step)
    for request in range(len(step.limits)):
        forwards = [depth for depth, asked in enumerate(decision.forwards, 1) if request in asked]
        layers = decision.layers[request]
        assert forwards == list(range(1, len(forwards) + 1)), "a request came back after a pause"
        assert len(forwards) <= layers
        if decision.truncated[request]:
            assert len(forwards) == layers, "truncated without having been looked at"


@many
@given(randoms)
def test_gates_count_whom_they_passed_and_whom_they_cut(source: random.Random) -> None:
    """Catches metrics that tell another story than the trees: a gate judges all that reached its
    layer, and a request that is truncated was cut by the gate at its last one."""
    step = random_step(source, policy=GATED)
    decision = decide(step)
    passed, cut = decision.growth.passed, decision.growth.cut
    assert set(passed) == set(cut) <= set(reference.thresholds(step.config))
    drafted = [r for r, cap in enumerate(decision.caps) if cap > 0]
    for depth in passed:
        reached = decision.forwards[depth - 1] if depth else drafted
        assert passed[depth] + cut[depth] == len(reached)
        assert cut[depth] == sum(
            decision.truncated[request] and decision.layers[request] == depth for request in reached
        )
    assert sum(cut.values()) == sum(decision.truncated)


@many
@given(randoms)
def test_no_layer_is_drafted_once_the_budget_is_spent(source: random.Random) -> None:
    """Catches a forward whose candidates nobody can pay for."""
    step = random_step(source, policy=GATED)
    decision = decide(step)
    for depth in range(1, len(decision.forwards) + 1):
        spent = sum(min(count, depth) for count in decision.layers)
        assert spent < step.offer().num_nodes
