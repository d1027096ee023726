# SPDX-License-Identifier: Apache-2.0
"""The scheduler's functions one by one, against the reference and by worked examples."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists, nodes_as_lists, randoms
from vllm_echo.gate import SparseGates
from vllm_echo.reference import schedule as reference
from vllm_echo.reference.schedule import ROOT, Node
from vllm_echo.schedule import (
    grant_layer,
    grant_width,
    rank_candidates,
    share_evenly,
    take_leading,
)
from vllm_echo.tree import CandidateTrees

many = settings(max_examples=100, deadline=None, derandomize=True)
budgets = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40, 2**31 - 1])
SCORES = [0.0, -0.5, -0.5, -1.0, -2.0, -120.0]


def random_candidates(source: random.Random, num_requests: int) -> list[list[Node]]:
    """Layerless candidate lists: a parent precedes its child and never scores below it."""
    requests = []
    for _ in range(num_requests):
        nodes: list[Node] = []
        for index in range(source.randint(0, 9)):
            parent = source.randint(ROOT, index - 1)
            above = Node(0, ROOT, 0, 0.0) if parent == ROOT else nodes[parent]
            score = above.score + source.choice(SCORES)
            nodes.append(Node(source.randrange(99), parent, above.depth + 1, score))
        requests.append(nodes)
    return requests


def candidate_trees(
    requests: list[list[Node]], truncated: list[bool], num_layers: list[int]
) -> CandidateTrees:
    """Tensors of the lists; places beyond a list are forbidden."""
    width = max([1, *map(len, requests)])
    unused = Node(0, ROOT, 1, -float("inf"))
    rows = [nodes + [unused] * (width - len(nodes)) for nodes in requests]

    def column(field: int, dtype: torch.dtype) -> torch.Tensor:
        values = [[node[field] for node in row] for row in rows]
        return torch.tensor(values, dtype=dtype).view(len(rows), width)

    return CandidateTrees(
        column(0, torch.int32),
        column(1, torch.int32),
        column(2, torch.int32),
        column(3, torch.float32),
        torch.tensor(num_layers, dtype=torch.int32),
        torch.tensor(truncated, dtype=torch.bool),
    )


@many
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans())), budgets)
def test_grant_layer_agrees_with_the_reference(
    requests: list[tuple[float, bool]], budget: int
) -> None:
    confidence, wants = [c for c, _ in requests], [w for _, w in requests]
    granted = grant_layer(
        torch.tensor(confidence), torch.tensor(wants, dtype=torch.bool), budget
    ).tolist()
    assert granted == reference.grant_layer(confidence, wants, min(budget, len(wants)))
    assert sum(granted) == min(budget, sum(wants))


def test_equal_confidence_is_served_in_request_order() -> None:
    """Catches an unstable sort: ranks that break a tie differently draft different trees."""
    wants = torch.ones(300, dtype=torch.bool)
    wants[::3] = False
    granted = grant_layer(torch.full((300,), 0.5), wants, 100).nonzero().flatten()
    assert granted.tolist() == wants.nonzero().flatten()[:100].tolist()


def test_confidence_0_still_wants_its_layer() -> None:
    """A path's probability may underflow; the request has passed its gates nevertheless."""
    wants = torch.tensor([True, False, True])
    assert grant_layer(torch.zeros(3), wants, 2).tolist() == [True, False, True]


@many
@given(randoms, budgets)
def test_grant_width_agrees_with_the_reference(source: random.Random, budget: int) -> None:
    requests = random_candidates(source, source.randint(0, 6))
    truncated = [source.random() < 0.5 for _ in requests]
    granted = [source.randint(0, min(3, len(nodes))) for nodes in requests]
    caps = [count + source.randint(0, 6) for count in granted]
    trees = candidate_trees(requests, truncated, granted)

    ranked = rank_candidates(trees, trees.scores.shape[1])
    counts = grant_width(
        ranked, trees.num_layers, torch.tensor(caps, dtype=torch.int32), budget
    ).tolist()

    scores = [[node.score for node in nodes] for nodes in requests]
    assert counts == reference.grant_width(scores, truncated, granted, caps, budget)
    assert sum(counts) - sum(granted) <= budget


@many
@given(st.lists(st.integers(0, 9)), budgets)
def test_share_evenly_agrees_with_the_reference(wanted: list[int], budget: int) -> None:
    counts = share_evenly(torch.tensor(wanted, dtype=torch.int32), budget).tolist()
    assert counts == reference.share_evenly(wanted, budget)
    assert sum(counts) == min(budget, sum(wanted))


@pytest.mark.parametrize(
    ("wanted", "budget", "shares"),
    [
        ([4, 4, 4], 12, [4, 4, 4]),
        ([4, 4, 4], 7, [3, 2, 2]),
        ([4, 4, 4], 2, [1, 1, 0]),
        ([1, 9, 9], 9, [1, 4, 4]),
        ([0, 3, 0], 2, [0, 2, 0]),
        ([5], 0, [0]),
    ],
)
def test_an_incomplete_round_goes_by_request_order(
    wanted: list[int], budget: int, shares: list[int]
) -> None:
    assert share_evenly(torch.tensor(wanted, dtype=torch.int32), budget).tolist() == shares


@many
@given(randoms)
def test_the_best_candidates_are_those_of_the_reference(source: random.Random) -> None:
    """Catches parents that are renumbered by the old order, and those cut off with the rest."""
    requests = random_candidates(source, source.randint(0, 5))
    counts = [source.randint(0, len(nodes)) for nodes in requests]
    trees = candidate_trees(requests, [False] * len(requests), counts)
    width = max([1, *counts]) + source.randint(0, 20)  # also wider than there are candidates

    ranked = rank_candidates(trees, width)
    taken = take_leading(ranked, trees.num_layers, width)

    assert taken.tokens.shape == (len(requests), width)
    best = [reference.take_best(n, count) for n, count in zip(requests, counts, strict=True)]
    assert as_lists(taken) == nodes_as_lists(best)
    for nodes, scores in zip(requests, ranked.scores.tolist(), strict=True):
        possible = [score for score in scores if score > -float("inf")]
        assert possible == sorted((node.score for node in nodes), reverse=True)[:width]
        assert scores[: len(possible)] == possible, "a forbidden candidate among the leading"


def test_what_truncated_requests_leave_lets_the_confident_go_deeper() -> None:
    """The elastic rule in one picture: of 6 nodes, request 0 is cut at its root and the other
    two share the rest by confidence, layer by layer."""
    confidence = torch.tensor([0.1, 0.5, 0.9])
    gates = SparseGates({0: 0.2})
    passed = gates.passes(0, confidence)
    assert passed.tolist() == [False, True, True]
    budget, layers = 5, torch.zeros(3, dtype=torch.int32)
    for _ in range(3):
        granted = grant_layer(confidence, passed, budget)
        layers += granted.to(torch.int32)
        budget -= int(granted.sum())
    assert layers.tolist() == [0, 2, 3]


def test_a_gate_asks_for_more_than_its_threshold() -> None:
    gates = SparseGates({2: 0.5, 4: 1.0, 5: 0.0})
    confidence = torch.tensor([0.0, 0.5, 0.625, 1.0])
    assert gates.passes(2, confidence).tolist() == [False, False, True, True]
    assert gates.passes(4, confidence).tolist() == [False] * 4
    assert gates.passes(5, confidence).tolist() == [False, True, True, True]
    assert gates.passes(3, confidence).tolist() == [True] * 4, "between gates nothing is decided"


def test_dense_gates_lie_on_the_line_between_the_sparse_ones() -> None:
    gates = SparseGates({4: 0.3, 1: 0.6}).at_every_depth(6)
    for depth, threshold in enumerate([0.6, 0.6, 0.5, 0.4, 0.3, 0.3]):
        assert gates.has_gate(depth)
        around = torch.tensor([threshold - 1e-6, threshold + 1e-6])
        assert gates.passes(depth, around).tolist() == [False, True]
    assert not gates.has_gate(6)


def test_no_gates_stay_no_gates_at_every_depth() -> None:
    """`"gates": []` means none, also of dense ones."""
    gates = SparseGates({}).at_every_depth(6)
    assert not any(gates.has_gate(depth) for depth in range(6))


def test_one_threshold_moves_no_gate() -> None:
    gates = SparseGates({0: 0.1, 3: 0.9}).with_threshold(0.5)
    assert [gates.has_gate(depth) for depth in range(5)] == [True, False, False, True, False]
    confidence = torch.tensor([0.4, 0.6])
    assert gates.passes(0, confidence).tolist() == [False, True]
    assert gates.passes(3, confidence).tolist() == [False, True]


def test_equal_scores_give_equal_confidence_wherever_they_stand() -> None:
    """Catches an exp that rounds differently in the tail of a vector: a tie would be no tie."""
    generator = torch.Generator().manual_seed(0)
    for score in (-8 * torch.rand(500, generator=generator)).tolist():
        confidence = torch.full((37, 3), score).amax(dim=1).exp()
        assert confidence.unique().numel() == 1
