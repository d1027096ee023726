# SPDX-License-Identifier: Apache-2.0
"""What one request may have, by the engine or by its own draft, is that request's affair alone."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists, randoms
from tests.core.machines import FREE
from tests.core.steps import BY_DRAFT, UNLIMITED, Step, decide, random_step
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import POLICIES, EchoConfig
from vllm_echo.reference.draft import Limits

# derandomize: the same examples in every run, so that a failure is nobody's bad luck.
many = settings(max_examples=100, deadline=None, derandomize=True)


@many
@given(randoms)
def test_no_tree_is_deeper_than_its_request_can_use(source: random.Random) -> None:
    """A request three tokens before its max_tokens throws away whatever lies deeper."""
    step = random_step(source)
    deepest = step.policy().shape.max_depth
    for limit, tree in zip(step.limits, as_lists(decide(step).trees), strict=True):
        most = min(limit.max_depth, limit.max_nodes, deepest if limit.can_expand else 1)
        assert all(depth <= most for _, _, depth in tree)


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
def test_nobody_is_drafted_for_deeper_than_its_cap(source: random.Random) -> None:
    """A node at depth d needs d nodes of the request's own, so a layer below depth max_nodes is
    a forward whose every candidate is thrown away."""
    step = random_step(source)
    decision = decide(step)
    for depth, asked in enumerate(decision.forwards, start=1):
        for request in asked:
            assert depth + 1 <= min(step.limits[request].max_depth, decision.caps[request])


@many
@given(randoms, st.integers(0, 8), st.booleans())
def test_a_request_near_its_limit_stops_no_other(
    source: random.Random, place: int, can_expand: bool
) -> None:
    """Catches batch-wide shortcuts: one request without room must not end the others' drafting."""
    step = random_step(source, policy=BY_DRAFT, budget=UNLIMITED)
    place = min(place, len(step.limits))
    crowd = (*step.limits[:place], Limits(0, can_expand), *step.limits[place:])
    original = step.children()

    def shifted(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        return original(request - (request > place), path)

    alone = as_lists(decide(step).trees)
    together = as_lists(decide(replace(step, limits=crowd), shifted).trees)
    assert together == [*alone[:place], [], *alone[place:]]


@many
@given(randoms)
def test_flags_of_one_request_change_no_other(source: random.Random) -> None:
    """A grammar or a temperature is its request's own affair: with budget for all, the others'
    confidences, gates and trees stay what they were, to the bit."""
    step = random_step(source, budget=UNLIMITED, sizes=[2, 3, 5, 9])
    if step.config.policy == "goodput":
        step = replace(step, config=replace(step.config, profile=FREE))
    changed = source.randrange(len(step.limits))
    limit = step.limits[changed]
    flags = source.choice([("chain_only",), ("sampled",), ("chain_only", "sampled")])
    limit = limit._replace(**{flag: not getattr(limit, flag) for flag in flags})
    limits = [*step.limits[:changed], limit, *step.limits[changed + 1 :]]
    offer = Offer(UNLIMITED, price=0.2, ms_per_token=5.0, plain_ms=20.0)

    before = decide(step, offer=offer)
    after = decide(replace(step, limits=tuple(limits)), offer=offer)

    width = min(before.candidates.scores.shape[1], after.candidates.scores.shape[1])
    for other in (r for r in range(len(limits)) if r != changed):
        assert as_lists(before.trees)[other] == as_lists(after.trees)[other]
        assert before.truncated[other] == after.truncated[other]
        assert before.layers[other] == after.layers[other]
        scores = before.candidates.scores[other], after.candidates.scores[other]
        assert scores[0][:width].tolist() == scores[1][:width].tolist()
        assert not any(part[width:].isfinite().any() for part in scores)


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
    config = EchoConfig(policy="echo", k_max=32, gates=())
    step = random_step(random.Random(5), kind="plain", limits=(limits, Limits(8)), budget=100)
    assert decide(replace(step, config=config)).counts == [nodes, 8]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_whose_draft_logits_are_nan_harms_nobody(
    policy: str, broken: float, depth: int
) -> None:
    """A head that overflows in half precision gives NaN for one request. That request may lose
    its draft; its tree must stay a tree, and the others' must stay what they were."""
    config = EchoConfig(policy=policy, gates=(), threshold=0.0, profile=FREE)
    limits = (Limits(8), Limits(8), Limits(8, sampled=True))
    step = Step(config, limits, seed=3, kind="plain", budget=100)
    original = step.children()

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        found = original(request, path)
        if request != 1 or len(path) != depth:
            return found
        return [(token, broken) for token, _ in found]

    offer = Offer(100, price=0.0, ms_per_token=5.0, plain_ms=20.0)
    trees = decide(step, children, offer).trees
    trees.validate()
    healthy = as_lists(decide(step, offer=offer).trees)
    assert all(healthy)
    assert [as_lists(trees)[r] for r in (0, 2)] == [healthy[r] for r in (0, 2)]
    assert all(depth_of <= depth for _, _, depth_of in as_lists(trees)[1]), "a node without a score"
