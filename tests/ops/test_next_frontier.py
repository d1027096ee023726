# SPDX-License-Identifier: Apache-2.0
"""The nodes to expand, malformed layers included; tests/core drafts whole trees with it."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops

NAN = math.nan
INF = math.inf
SCORES = [0.0, -0.0, -0.5, -0.5, -1.0, -120.0, -3.0e38, INF, -INF, NAN]
Layer = dict[str, torch.Tensor | int]


def int64s(source: random.Random, *shape: int) -> torch.Tensor:
    values = [source.randrange(-(2**63), 2**63) for _ in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.int64).view(shape)


def some_of(source: random.Random, among: list[int], least: int = 0) -> list[int]:
    return sorted(source.sample(among, source.randint(min(least, len(among)), len(among))))


def mask_of(requests: list[int], size: int) -> torch.Tensor:
    return torch.tensor([r in requests for r in range(size)], dtype=torch.bool)


def random_layer(
    source: random.Random, num_requests: int, parents: int, top_k: int, *, first: bool
) -> Layer:
    """Of ``parents`` nodes, or, where ``first``, of the root alone."""
    columns = top_k * (1 if first else parents)
    count = num_requests * columns
    distinct = source.random() < 0.3
    scores = [source.uniform(-9, 0) if distinct else source.choice(SCORES) for _ in range(count)]
    previous = some_of(source, list(range(num_requests)), least=1)
    words = source.randint(1, 2)
    layer: Layer = {
        "tokens": torch.tensor(source.sample(range(10**6), count), dtype=torch.int32),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "active": mask_of(some_of(source, previous), num_requests),
        "own_bits": int64s(source, source.randint(0, columns), words),
        "top_k": top_k,
    }
    for name in ("tokens", "scores"):
        layer[name] = layer[name].view(num_requests, columns)
    if not first:
        layer["previous_requests"] = torch.tensor(previous, dtype=torch.int64)
        layer["ancestors"] = int64s(source, len(previous), parents, words)
    return layer


def obvious_frontier(layer: Layer) -> list[list]:
    """Every active request; and its nodes' tokens, parent rows, ancestors, columns, scores."""
    out: list[list] = [[], [], [], [], [], []]
    own_bits = layer["own_bits"].tolist()
    for request in layer["active"].nonzero().flatten().tolist():
        scores = [-INF if math.isnan(s) else s for s in layer["scores"][request].tolist()]
        columns = sorted(range(len(scores)), key=lambda c: (-scores[c], c))[: len(own_bits)]
        if "ancestors" in layer:
            place = layer["previous_requests"].tolist().index(request)
            parents = [column // layer["top_k"] for column in columns]
            rows = [place * layer["ancestors"].shape[1] + parent for parent in parents]
            above = [layer["ancestors"][place, parent].tolist() for parent in parents]
        else:
            rows = [request] * len(columns)
            above = [[0] * len(bits) for bits in own_bits]
        both = zip(above, own_bits, strict=True)
        nodes = (
            request,
            [int(layer["tokens"][request, column]) for column in columns],
            rows,
            [[a | b for a, b in zip(*words, strict=True)] for words in both],
            columns,
            [scores[column] for column in columns],
        )
        for values, value in zip(out, nodes, strict=True):
            values.append(value)
    return out


def assert_expanded(layer: Layer) -> list[torch.Tensor]:
    got = ops.next_frontier(**layer)
    shape = int(layer["active"].sum()), layer["own_bits"].shape[0]
    int64 = torch.int64
    assert [t.dtype for t in got] == [int64, torch.int32, int64, int64, int64, torch.float32]
    assert got[3].shape == (*shape, layer["own_bits"].shape[1])
    for tensor in got:
        assert tensor.shape[:2] == shape[: tensor.dim()]
        assert tensor.is_contiguous()
    assert [tensor.tolist() for tensor in got] == obvious_frontier(layer)
    return list(got)


@settings(max_examples=200, deadline=None)
@given(
    num_requests=st.integers(0, 5),
    parents=st.integers(1, 5),
    top_k=st.integers(1, 6),
    first=st.booleans(),
    seed=st.integers(),
)
def test_any_layer_is_expanded_as_by_the_obvious_version(
    num_requests: int, parents: int, top_k: int, first: bool, seed: int
) -> None:
    """Ties, both zeros, NaN and infinities, no request and no node included."""
    assert_expanded(random_layer(random.Random(seed), num_requests, parents, top_k, first=first))


def test_a_large_layer() -> None:
    for first in (True, False):
        assert_expanded(random_layer(random.Random(0), 200, 20, 30, first=first))


def test_ties_go_by_column_and_impossible_nodes_come_last_in_theirs() -> None:
    layer: Layer = {
        "tokens": torch.arange(6, dtype=torch.int32)[None],
        "scores": torch.tensor([[-INF, -1.0, NAN, -0.5, -1.0, -0.5]]),
        "active": torch.tensor([True]),
        "own_bits": 8 << torch.arange(6)[:, None],
        "top_k": 2,
        "previous_requests": torch.tensor([0]),
        "ancestors": torch.tensor([[[1], [2], [4]]]),
    }
    _, _, parent_rows, ancestors, columns, scores = assert_expanded(layer)
    assert columns.tolist() == [[3, 5, 1, 4, 0, 2]]
    assert parent_rows.tolist() == [[1, 2, 0, 2, 0, 1]]
    assert ancestors.flatten().tolist() == [2 + 8, 4 + 16, 1 + 32, 4 + 64, 1 + 128, 2 + 256]
    assert scores.tolist() == [[-0.5, -0.5, -1.0, -1.0, -INF, -INF]]


def test_columns_of_a_wider_table_are_read_by_their_stride() -> None:
    """The drafter hands out the columns of one depth."""
    layer = random_layer(random.Random(1), 5, 3, 4, first=False)
    plain = ops.next_frontier(**layer)
    for name in ("tokens", "scores"):
        wide = torch.cat([layer[name][:, :1], layer[name], layer[name]], dim=1)
        layer[name] = wide[:, 1:13]
        assert not layer[name].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(assert_expanded(layer), plain, strict=True))


def good_layer() -> Layer:
    """4 requests, of which 0, 2 and 3 were expanded before, with 2 nodes of 3 children each."""
    source = random.Random(2)
    return {
        "tokens": torch.arange(24, dtype=torch.int32).view(4, 6),
        "scores": -torch.arange(24.0).view(4, 6),
        "active": mask_of([0, 3], 4),
        "own_bits": int64s(source, 4, 2),
        "top_k": 3,
        "previous_requests": torch.tensor([0, 2, 3]),
        "ancestors": int64s(source, 3, 2, 2),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scores", torch.zeros(3, 6), "scores must have size 4 in dimension 0"),
        ("scores", torch.zeros(4, 5), "scores must have size 6 in dimension 1"),
        ("active", mask_of([0], 3), "active must have size 4 in dimension 0"),
        ("active", mask_of([0, 1], 4), "active names request 1, which is not in previous_requests"),
        ("own_bits", torch.zeros(7, 2).long(), "own_bits names 7 nodes .* tokens has 6 columns"),
        ("own_bits", torch.zeros(2, 4).long().mT, "own_bits must be contiguous"),
        ("own_bits", torch.zeros(4, 1).long(), "ancestors must have size 1 in dimension 2"),
        ("top_k", 0, "top_k must be positive, got 0"),
        ("top_k", -(2**63), "top_k must be positive"),
        ("top_k", 2, "ancestors has 2 parents with 2 children each"),
        ("previous_requests", torch.tensor([0, 3]), "ancestors must have size 2 in dimension 0"),
        ("previous_requests", torch.tensor([3, 2, 0]), "previous_requests must ascend"),
        ("previous_requests", torch.tensor([0, 3, 4]), "previous_requests names request 4 of 4"),
        ("previous_requests", torch.tensor([0, 1, 2]), "request 3, which is not in"),
        ("previous_requests", None, "must come together"),
        ("ancestors", None, "must come together"),
        ("ancestors", torch.zeros(3, 1, 2).long(), "ancestors has 1 parents with 3 children"),
        ("ancestors", torch.zeros(2, 2, 2).long(), "ancestors must have size 3"),
        ("ancestors", torch.zeros(3, 3, 2).long()[:, :2], "ancestors must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, message: str) -> None:
    """A wild index must not lead out of a tensor."""
    layer = good_layer()
    assert_expanded(layer)
    layer[name] = value
    with pytest.raises(ValueError, match=f"next_frontier: .*{message}"):
        ops.next_frontier(**layer)


@pytest.mark.parametrize("name", ["tokens", "scores"])
def test_columns_that_are_apart_are_refused(name: str) -> None:
    layer = good_layer()
    layer[name] = layer[name].mT.contiguous().mT
    with pytest.raises(ValueError, match="must be contiguous in its last dimension"):
        ops.next_frontier(**layer)
