# SPDX-License-Identifier: Apache-2.0
"""The scheduler's functions one by one, against the reference and by worked examples."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists, nodes_as_lists, randoms
from vllm_echo import ops
from vllm_echo.core.decision import Decision, Rule
from vllm_echo.core.gate import Limits, SparseGates
from vllm_echo.core.schedule import admit_nodes, order_trees
from vllm_echo.core.shape import TreeShape
from vllm_echo.core.tree import CandidateTrees
from vllm_echo.reference import schedule as reference
from vllm_echo.reference.schedule import ROOT, Node, probability, to_float32

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


IN_TURNS = Decision(
    rule=Rule.SHARES,
    shape=TreeShape.within(1, 1, 1),
    budget=0,
    max_depth=1,
    thresholds=(None,),
    width=True,
    transfer=True,
)


def candidate_trees(requests: list[list[Node]]) -> CandidateTrees:
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
    )


def growth_of(count: int) -> tuple[torch.Tensor, ...]:
    """Active, caps, deepest, layers so far and truncated of requests that nothing limits."""
    most = torch.full((count,), 255, dtype=torch.int32)
    yes = torch.ones(count, dtype=torch.bool)
    return yes, most, most.clone(), torch.zeros_like(most), ~yes


def grant_layer(confidence: torch.Tensor, wants: list[bool], budget: int) -> list[bool]:
    """Who is granted a layer where no gate stands; who wants none has reached its cap."""
    active, caps, deepest, num_layers, truncated = growth_of(len(wants))
    caps *= torch.tensor(wants, dtype=torch.int32)
    best = confidence.clamp(min=1e-45).log()
    state = (active, caps, deepest, num_layers, truncated)
    deeper, counts = ops.grant_layer(best, *state, 0, None, budget)
    assert num_layers.tolist() == deeper.int().tolist()
    assert int(counts[2]) == int(deeper.sum())
    return deeper.tolist()


@many
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans())), budgets)
def test_grant_layer_agrees_with_the_reference(
    requests: list[tuple[float, bool]], budget: int
) -> None:
    confidence, wants = [c for c, _ in requests], [w for _, w in requests]
    granted = grant_layer(torch.tensor(confidence), wants, budget)
    assert granted == reference.grant_layer(confidence, wants, min(budget, len(wants)))
    assert sum(granted) == min(budget, sum(wants))


def test_equal_confidence_is_served_in_request_order() -> None:
    """Catches an unstable sort: ranks that break a tie differently draft different trees."""
    wants = [request % 3 != 0 for request in range(300)]
    granted = grant_layer(torch.full((300,), 0.5), wants, 100)
    assert [r for r, yes in enumerate(granted) if yes] == [r for r in range(300) if wants[r]][:100]


def test_confidence_0_still_wants_its_layer() -> None:
    """A path's probability may underflow; the request has passed its gates nevertheless. But a
    layer without any candidate is not paid for."""
    best = torch.tensor([-200.0, -torch.inf, -200.0])
    growth = growth_of(3)
    deeper, counts = ops.grant_layer(best, *growth, 0, None, 2)
    assert deeper.tolist() == [True, False, True]
    assert counts.tolist() == [2, 0, 2]
    gated = ops.grant_layer(best, *growth_of(3), 0, 0.0, 2)[0]
    assert gated.tolist() == [False] * 3, "above a threshold of 0 is not 0"


def test_a_request_at_its_end_pays_for_a_layer_that_nobody_expands() -> None:
    active, caps, _, num_layers, truncated = growth_of(3)
    caps[2] = 0
    deepest = torch.tensor([2, 3, 9], dtype=torch.int32)
    best = torch.full((3,), -0.5)
    deeper, counts = ops.grant_layer(best, active, caps, deepest, num_layers, truncated, 1, None, 9)
    assert deeper.tolist() == [False, True, False]
    assert num_layers.tolist() == [1, 1, 0], "one has a cap of 0"
    assert counts.tolist() == [3, 0, 2]
    assert not truncated.any()


def share_evenly(wanted: list[int], budget: int) -> list[int]:
    """Nodes of requests that have so many candidates, in turns."""
    width = max([1, *wanted])
    scores = torch.full((len(wanted), width), -torch.inf)
    for row, count in zip(scores, wanted, strict=True):
        row[:count] = -0.5
    depths = torch.ones(scores.shape, dtype=torch.int32)
    most = torch.full((len(wanted),), 255, dtype=torch.int32)
    table = (depths, -depths, depths, scores)
    keys = ops.order_trees(*table, most, most, torch.zeros(0), Rule.SHARES, True, width)[3]
    return ops.admit_nodes(keys, budget).tolist()


@many
@given(st.lists(st.integers(0, 9)), budgets)
def test_turns_agree_with_the_reference(wanted: list[int], budget: int) -> None:
    counts = share_evenly(wanted, budget)
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
    assert share_evenly(wanted, budget) == shares


@many
@given(randoms)
def test_the_best_candidates_are_those_of_the_reference(source: random.Random) -> None:
    """Catches parents that are renumbered by the old order, and those cut off with the rest."""
    requests = random_candidates(source, source.randint(0, 5))
    counts = [source.randint(0, len(nodes)) for nodes in requests]
    width = max([1, *counts]) + source.randint(0, 20)  # also wider than there are candidates

    caps = torch.tensor(counts, dtype=torch.int32)
    everywhere = torch.full_like(caps, 99)
    trees = order_trees(
        candidate_trees(requests), Limits(caps, everywhere, caps > 0), IN_TURNS, width
    )
    taken = admit_nodes(trees, sum(counts))

    assert taken.tokens.shape == (len(requests), width)
    best = [reference.take_best(n, count) for n, count in zip(requests, counts, strict=True)]
    assert as_lists(taken) == nodes_as_lists(best)


def test_what_truncated_requests_leave_lets_the_confident_go_deeper() -> None:
    """The elastic rule in one picture: of 5 nodes, request 0 is cut at its root and the other
    two share the rest by confidence, layer by layer."""
    best = torch.tensor([0.1, 0.5, 0.9]).log()
    active, caps, deepest, num_layers, truncated = growth_of(3)
    budget, gates = 5, SparseGates({0: 0.2})
    for depth in range(3):
        state = (active, caps, deepest, num_layers, truncated)
        active, counts = ops.grant_layer(best, *state, depth, gates.threshold(depth), budget)
        assert counts.tolist()[:2] == [[2, 1], [2, 0], [2, 0]][depth]
        budget -= int(counts[2])
    assert truncated.tolist() == [True, False, False]
    assert num_layers.tolist() == [0, 2, 3]


def test_a_gate_asks_for_more_than_its_threshold() -> None:
    """Compared in float32, as the confidence is: 0.6 in float64 lies above it."""
    best = torch.tensor([0.0, 0.5, 0.625, 1.0]).log()
    for threshold, passes in (
        (0.5, [False, False, True, True]),
        (1.0, [False] * 4),
        (0.0, [False, True, True, True]),
        (None, [False, True, True, True]),
    ):
        growth = growth_of(4)
        deeper, counts = ops.grant_layer(best, *growth, 0, threshold, 9)
        assert deeper.tolist() == passes
        cut = [value > -torch.inf and not yes for value, yes in zip(best, passes, strict=True)]
        assert growth[-1].tolist() == cut
        assert counts.tolist() == [sum(passes), sum(cut), sum(passes)]
    score = torch.tensor([math.log(to_float32(0.6))])
    while probability(score.item()) != to_float32(0.6):
        score = score.nextafter(torch.tensor([0.0]))
    assert not ops.grant_layer(score, *growth_of(1), 0, 0.6, 9)[0]


def test_dense_gates_lie_on_the_line_between_the_sparse_ones() -> None:
    gates = SparseGates({4: 0.3, 1: 0.6}).at_every_depth(6)
    for depth, threshold in enumerate([0.6, 0.6, 0.5, 0.4, 0.3, 0.3]):
        assert gates.threshold(depth) == pytest.approx(threshold, abs=1e-9)
    assert gates.threshold(6) is None


def test_no_gates_stay_no_gates_at_every_depth() -> None:
    """`"gates": []` means none, also of dense ones."""
    gates = SparseGates({}).at_every_depth(6)
    assert gates.by_depth(6) == (None,) * 6


def test_one_threshold_moves_no_gate() -> None:
    gates = SparseGates({0: 0.1, 3: 0.9}).with_threshold(0.5)
    assert [gates.threshold(depth) for depth in range(5)] == [0.5, None, None, 0.5, None]
