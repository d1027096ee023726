# SPDX-License-Identifier: Apache-2.0
"""The order in which nodes are admitted: ranks, malformed tables included, and keys.

What it means for whole steps is tested in tests/core/test_schedule."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.core.decision import Rule
from vllm_echo.reference import schedule as reference
from vllm_echo.reference.schedule import Node, to_float32

NAN = math.nan
INF = math.inf
SCORES = [0.0, -0.0, -0.5, -0.5, -1.0, -120.0, -3.0e38, INF, -INF, NAN]

NO_NODE = 2**63 - 1
Row = tuple[int, int, int]


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rank_row(tokens: list, parents: list, depths: list, scores: list, max_nodes: int) -> list[Row]:
    """The obvious version, of one request."""
    scores = [-INF if math.isnan(score) else score for score in scores]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    place = {-1: -1, **{index: rank for rank, index in enumerate(order)}}
    kept = [(tokens[i], place[parents[i]], depths[i]) for i in order[:max_nodes]]
    return kept + [(0, -1, 0)] * (max_nodes - len(kept))


def in_turns(*table: torch.Tensor, max_nodes: int) -> tuple[torch.Tensor, ...]:
    """``order_trees`` of requests that nothing limits, by the rule that looks at rank alone."""
    caps = torch.full((table[0].shape[0],), 2**31 - 1, dtype=torch.int32)
    return ops.order_trees(*table, caps, caps, torch.zeros(0), Rule.SHARES, True, max_nodes)


def assert_ranked(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    max_nodes: int,
) -> None:
    *got, keys = in_turns(tokens, parents, depths, scores, max_nodes=max_nodes)
    assert [column.dtype for column in (*got, keys)] == [torch.int32] * 3 + [torch.int64]
    for column in (*got, keys):
        assert column.shape == (scores.shape[0], max_nodes)
    rows = zip(tokens.tolist(), parents.tolist(), depths.tolist(), scores.tolist(), strict=True)
    ranked = zip(*(column.tolist() for column in got), strict=True)
    for row, columns in zip(rows, ranked, strict=True):
        assert list(zip(*columns, strict=True)) == rank_row(*row, max_nodes)


def random_table(
    source: random.Random, shape: tuple[int, int], scores: list[float] | None = None
) -> tuple[torch.Tensor, ...]:
    """Any parents, before and behind: ranking asks only that they are candidates."""
    num_candidates = shape[1]

    def table(draw: Callable[[], float], dtype: torch.dtype) -> torch.Tensor:
        values = [[draw() for _ in range(num_candidates)] for _ in range(shape[0])]
        return torch.tensor(values, dtype=dtype).view(shape)

    return (
        table(lambda: source.randrange(2**31), torch.int32),
        table(lambda: source.randrange(-1, num_candidates), torch.int32),
        table(lambda: source.randrange(1, 99), torch.int32),
        table(
            lambda: source.choice(scores) if scores else source.uniform(-9.0, 0.0), torch.float32
        ),
    )


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 40)),
    max_nodes=st.one_of(st.integers(0, 45), st.just(255)),
    distinct=st.booleans(),
    seed=st.integers(),
)
def test_any_table_is_ranked_as_the_obvious_version(
    shape: tuple[int, int], max_nodes: int, distinct: bool, seed: int
) -> None:
    """Ties, both zeros, NaN and infinities, no request and no candidate included."""
    table = random_table(random.Random(seed), shape, None if distinct else SCORES)
    assert_ranked(*table, max_nodes)


def test_a_large_table() -> None:
    """More candidates than any policy drafts, few distinct scores: long ties."""
    source = random.Random(0)
    assert_ranked(*random_table(source, (3, 16_000)), 255)
    assert_ranked(*random_table(source, (2, 16_000), SCORES), 255)
    assert_ranked(*random_table(source, (256, 60), SCORES), 30)


def test_ties_go_by_index_and_impossible_candidates_come_last_in_theirs() -> None:
    tokens, parents, depths, keys = in_turns(
        int32([[0, 1, 2, 3, 4, 5, 6]]),
        int32([[-1, -1, -1, 2, 2, -1, 3]]),
        int32([[1, 1, 1, 2, 2, 1, 3]]),
        torch.tensor([[-INF, 0.0, -0.0, -1.0, NAN, -INF, -1.0]]),
        max_nodes=7,
    )
    assert tokens.tolist() == [[1, 2, 3, 6, 0, 4, 5]]
    assert parents.tolist() == [[-1, -1, 1, 2, -1, 1, -1]]
    assert depths.tolist() == [[1, 1, 2, 3, 1, 2, 1]]
    assert (keys < NO_NODE).tolist() == [[True] * 4 + [False] * 3]


def test_neighbouring_scores_are_told_apart() -> None:
    """Catches a sort by something coarser than float32, and one that loses the smallest."""
    values = torch.tensor([[1e-45, -1e-45, -1e-38, -0.1, 1.5, -(2.0**127)]])
    above = torch.nextafter(values, torch.full_like(values, INF))
    scores = torch.cat([values, above], dim=1)
    index = torch.arange(12, dtype=torch.int32)[None]
    ranked = in_turns(index, index * 0 - 1, index * 0 + 1, scores, max_nodes=12)[0]
    assert ranked.tolist() == scores.sort(dim=1, descending=True, stable=True).indices.tolist()


def test_rows_of_a_wider_table_are_read_by_their_stride() -> None:
    """The drafter hands out leading columns, and one row of depths for all requests."""
    tokens, parents, depths, scores = random_table(random.Random(1), (6, 12))
    wide = parents.clamp(max=8)  # of the first 9 columns
    depths = depths[0].expand(6, 12)
    assert depths.stride(0) == 0
    narrow = tokens[:, :9], wide[:, :9], depths[:, :9], scores[:, :9]
    assert_ranked(*narrow, 4)
    assert_ranked(*(column[1::2] for column in narrow), 20)
    assert_ranked(*(column[:, 2:3] for column in (tokens, wide.clamp(max=0), depths, scores)), 1)


@pytest.mark.parametrize("parent", [3, 1000, 2**31 - 1, -2, -(2**31)])
def test_a_parent_that_is_no_candidate_is_refused(parent: int) -> None:
    """A wild index must not lead out of the table."""
    tokens, depths = int32([[5, 6, 7]] * 2), int32([[1, 2, 2]] * 2)
    parents = int32([[-1, 0, 0], [-1, 0, parent]])
    scores = torch.tensor([[0.0, -1.0, -2.0], [-0.5, -2.0, -1.0]])
    with pytest.raises(
        ValueError, match="parents of request 1: that of candidate 2 is none of its 3 candidates"
    ):
        in_turns(tokens, parents, depths, scores, max_nodes=2)
    kept = in_turns(tokens, parents, depths, scores, max_nodes=1)  # it is not among the kept
    assert kept[1].tolist() == [[-1], [-1]]


@pytest.mark.parametrize("blamed", ["parents", "depths", "scores"])
def test_tables_of_different_shapes_are_refused(blamed: str) -> None:
    names = "tokens", "parents", "depths", "scores"
    table = dict(zip(names, random_table(random.Random(2), (3, 4)), strict=True))
    for cut, dim in ((table[blamed][:2], 0), (table[blamed][:, :3], 1)):
        with pytest.raises(ValueError, match=f"order_trees: {blamed} must have size . .* {dim}"):
            in_turns(*{**table, blamed: cut}.values(), max_nodes=4)


@pytest.mark.parametrize("blamed", [0, 1, 2, 3])
def test_columns_that_are_apart_are_refused(blamed: int) -> None:
    table = list(random_table(random.Random(3), (3, 4)))
    table[blamed] = table[blamed].mT.contiguous().mT
    with pytest.raises(ValueError, match="must be contiguous in its last dimension"):
        in_turns(*table, max_nodes=4)


@pytest.mark.parametrize("max_nodes", [-1, 256])
def test_a_width_that_keys_cannot_hold_is_refused(max_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"max_nodes must be 0 to 255, got {max_nodes}"):
        in_turns(*random_table(random.Random(4), (1, 2)), max_nodes=max_nodes)


def test_more_nodes_than_keys_can_name_are_refused() -> None:
    """Their places would run into the value before them."""
    table = [tensor[:1].expand(16_449, 2) for tensor in random_table(random.Random(4), (1, 2))]
    with pytest.raises(
        ValueError, match="at most 4194304 nodes can be ordered, got 16449 requests"
    ):
        in_turns(*table, max_nodes=255)
    assert in_turns(*table, max_nodes=254)[3].shape == (16_449, 254)


def test_an_unknown_rule_is_refused() -> None:
    table, caps = random_table(random.Random(4), (1, 2)), int32([1])
    with pytest.raises(ValueError, match="order_trees: rule must be 0 .gates., 1 .price. or 2"):
        ops.order_trees(*table, caps, caps, torch.zeros(0), 3, True, 1)


def random_nodes(source: random.Random, scores: list[float]) -> list[Node]:
    """Candidates in any order of depths: a child comes after its parent and scores no more."""
    nodes: list[Node] = []
    for index in range(source.randint(0, 12)):
        parent = source.choice([-1, source.randint(-1, index - 1)])
        above = Node(0, -1, 0, 0.0) if parent < 0 else nodes[parent]
        score = to_float32(above.score + source.choice(scores))
        nodes.append(Node(index, parent, above.depth + 1, score))
    return nodes


def table_of(requests: list[list[Node]]) -> tuple[torch.Tensor, ...]:
    """Padded with candidates that are none."""
    width = max([1, *map(len, requests)])
    rows = [nodes + [Node(0, -1, 1, -INF)] * (width - len(nodes)) for nodes in requests]
    dtypes = (torch.int32, torch.int32, torch.int32, torch.float32)
    return tuple(
        torch.tensor([[node[field] for node in row] for row in rows], dtype=dtype).view(
            len(rows), width
        )
        for field, dtype in enumerate(dtypes)
    )


def without_layers_below(nodes: list[Node], last: int) -> list[Node]:
    return [node if node.depth <= last else node._replace(score=-INF) for node in nodes]


def obvious_order(
    rule: Rule,
    requests: list[list[Node]],
    caps: list[int],
    deepest: list[int],
    thresholds: list[float | None],
    width: bool,
) -> tuple[list[list[Node]], list[list[tuple[float, ...]]]]:
    """The candidates that count, and their places, by the reference."""
    counted, places = [], []
    for nodes, cap, last in zip(requests, caps, deepest, strict=True):
        if rule is Rule.GATES:
            layers = reference.pass_gates(nodes, cap, last, thresholds)
            nodes = without_layers_below(nodes, layers.last)
            places.append(reference.places_by_gates(nodes, cap, layers, width))
        else:
            nodes = without_layers_below(nodes, max(last, 1) if cap > 0 else 0)
            place = reference.places_by_price if rule is Rule.PRICE else reference.places_in_turns
            places.append(place(nodes, cap))
        counted.append(nodes)
    return counted, places


@settings(max_examples=400, deadline=None)
@given(rule=st.sampled_from(Rule), distinct=st.booleans(), seed=st.integers())
def test_any_candidates_are_ordered_as_by_the_reference(
    rule: Rule, distinct: bool, seed: int
) -> None:
    """Ties, -inf, worths that underflow, caps below 0 and beyond the table, gates anywhere."""
    source = random.Random(seed)
    steps = [-source.random() for _ in range(99)] if distinct else [0.0, -0.5, -1.0, -120.0, -INF]
    requests = [random_nodes(source, steps) for _ in range(source.randint(0, 6))]
    caps = [source.choice([-1, 0, 1, 2, 3, 8, 2**31 - 1]) for _ in requests]
    deepest = [source.choice([0, 1, 2, 3, 9]) for _ in requests]
    thresholds = [source.choice([None, None, 0.0, 0.2, 0.6]) for _ in range(source.randint(1, 5))]
    width, max_nodes = source.random() < 0.7, source.randint(0, 14)

    tokens, parents, depths, keys = ops.order_trees(
        *table_of(requests),
        int32(caps),
        int32(deepest),
        torch.tensor([NAN if t is None else t for t in thresholds]),
        rule,
        width,
        max_nodes,
    )

    counted, places = obvious_order(rule, requests, caps, deepest, thresholds, width)
    places = [row[:max_nodes] for row in places]
    ours = [(key, r, i) for r, row in enumerate(keys.tolist()) for i, key in enumerate(row)]
    order = [(r, rank) for key, r, rank in sorted(ours) if key < NO_NODE]
    theirs = [(place, r, rank) for r, row in enumerate(places) for rank, place in enumerate(row)]
    assert order == [(r, rank) for _, r, rank in sorted(theirs)]
    assert all(row == sorted(row) and row[:1] >= [0] for row in keys.tolist() if row)
    for r, nodes in enumerate(counted):
        taken = reference.take_best(nodes, len(places[r]))
        for rank, node in enumerate(taken):
            got = (tokens[r, rank], parents[r, rank], depths[r, rank])
            assert tuple(map(int, got)) == node[:3]


def test_every_key_is_told_apart_at_the_limits_of_its_fields() -> None:
    """The deepest layer, the last place, the highest and the lowest score: catches a field that
    runs into the next one."""
    requests, most = 16_448, 255
    assert requests * most < 2**22 <= (requests + 1) * most
    depth = torch.arange(1, most + 1, dtype=torch.int32).expand(requests, most)
    parent = depth - 2
    scores = (-3.0e38 * (depth > 200)).float()
    caps = torch.full((requests,), 255, dtype=torch.int32)
    gates = torch.full((most,), NAN)
    for cut, width in ((gates, False), (torch.tensor([1.0]), True)):
        keys = ops.order_trees(depth, parent, depth, scores, caps, caps, cut, 0, width, most)[3]
        flat = keys.flatten()
        nodes = flat[flat < NO_NODE]
        assert nodes.shape[0] == (requests * most if not width else requests)
        assert nodes.min() >= 0 and nodes.unique().shape == nodes.shape
        order = nodes.argsort()
        # Depth by depth, and within a depth by request.
        if not width:
            assert torch.equal(order, torch.arange(requests * most).view(-1, most).T.flatten())
