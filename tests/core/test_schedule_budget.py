# SPDX-License-Identifier: Apache-2.0
"""The elastic scheduler at once decides as the draft loop does layer by layer."""

import random
from dataclasses import replace

import torch
from hypothesis import given, settings

from tests.core.kit import as_lists, randoms
from tests.core.steps import GATED, Decision, Step, TableHead, decide, draft_batch, random_step
from vllm_echo import ops
from vllm_echo.core.budget import Offer
from vllm_echo.core.draft import grow_trees
from vllm_echo.core.policies import ElasticPolicy, make_recording_policy
from vllm_echo.core.tree import CandidateTrees, DraftTrees


def drafted_in_full(step: Step) -> CandidateTrees:
    """All layers of everybody, whatever gates and budget say."""
    policy = make_recording_policy(step.config)
    head = TableHead(step.children(), len(step.limits), policy)
    return grow_trees(head, draft_batch(step.limits), policy, Offer(10**6), step.load)[0]


def thresholds_of(step: Step) -> torch.Tensor:
    policy = step.policy()
    assert isinstance(policy, ElasticPolicy)
    values = [policy.gates.threshold(depth) for depth in range(step.config.max_depth)]
    return torch.tensor([torch.nan if value is None else value for value in values])


def at_once(step: Step, decision: Decision) -> tuple[torch.Tensor, ...]:
    full = drafted_in_full(step)
    return ops.schedule_budget(
        full.tokens,
        full.parents,
        full.depths,
        full.scores,
        decision.growth.caps,
        decision.growth.deepest,
        thresholds_of(step),
        step.offer().num_nodes,
        step.config.width,
        step.config.num_speculative_tokens,
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(randoms)
def test_it_decides_as_the_draft_loop(source: random.Random) -> None:
    step = random_step(source, policy=GATED)
    decision = decide(step)
    tokens, parents, depths, _, num_nodes, num_layers, truncated, counts = at_once(step, decision)
    trees = DraftTrees(tokens, parents, depths, num_nodes)
    assert as_lists(trees) == as_lists(decision.trees)
    assert num_layers.tolist() == decision.layers
    assert truncated.tolist() == decision.truncated
    passed, cut, granted = counts.sum(dim=0).tolist()
    assert granted == sum(decision.layers)
    assert cut == sum(decision.truncated)
    growth = decision.growth
    for depth in growth.passed:
        assert counts[depth, :2].tolist() == [growth.passed[depth], growth.cut[depth]]


def test_what_a_gate_cuts_off_is_no_candidate_of_width() -> None:
    """A request that is cut at its root keeps its first layer only, however good what lies below
    it would have been: catches a device that spends the budget on what ECHO never drafts."""
    source = random.Random(3)
    cut_short = 0
    for _ in range(100):
        step = random_step(source, policy="echo", kind="distinct", width=True, transfer=True)
        step = replace(step, budget=10**6)
        _, _, depths, _, num_nodes, num_layers, truncated, _ = at_once(step, decide(step))
        for r in truncated.nonzero().flatten().tolist():
            if num_nodes[r] > 0:
                cut_short += 1
                assert depths[r, : num_nodes[r]].max() <= num_layers[r] + 1
    assert cut_short > 10
