# SPDX-License-Identifier: Apache-2.0
"""Drafted children as candidates; tests/core drafts whole trees with it."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.calls import append_arguments
from vllm_echo import ops

INF = math.inf
SCORES = [0.0, -0.5, -0.5, -1.0, -120.0, -3.0e38, INF, -INF, math.nan]
UNTOUCHED = 77
Layer = dict[str, torch.Tensor | int]


def random_layer(
    source: random.Random, num_requests: int, parents: int, top_k: int, *, first: bool
) -> Layer:
    """Children of ``parents`` nodes, or, where ``first``, of the root alone, in a wider table."""
    parents = 1 if first else parents
    columns = parents * top_k
    requests = sorted(source.sample(range(num_requests), source.randint(0, num_requests)))
    count = len(requests) * columns
    table = {
        "tokens": torch.full((num_requests, columns + 3), UNTOUCHED, dtype=torch.int32),
        "parents": torch.full((num_requests, columns + 3), UNTOUCHED, dtype=torch.int32),
        "scores": torch.full((num_requests, columns + 3), float(UNTOUCHED)),
    }
    shape = (len(requests), parents, top_k)
    layer: Layer = {
        **{name: column[:, 1 : 1 + columns] for name, column in table.items()},
        "requests": torch.tensor(requests, dtype=torch.int64),
        "child_tokens": torch.tensor(source.sample(range(10**6), count), dtype=torch.int32).view(
            shape
        ),
        "child_scores": torch.tensor(source.choices(SCORES, k=count)).view(shape),
        "chain_only": torch.tensor([source.random() < 0.3 for _ in range(num_requests)]).bool(),
    }
    if not first:
        above = [source.choice(SCORES[:5]) for _ in range(len(requests) * parents)]
        places = [source.randrange(50) for _ in above]
        layer["parent_scores"] = torch.tensor(above, dtype=torch.float32).view(shape[:2])
        layer["parent_columns"] = torch.tensor(places, dtype=torch.int64).view(shape[:2])
        layer["first_parent_column"] = source.randrange(100)
    return layer


def obvious_layer(layer: Layer) -> tuple[list, list, list, list]:
    """Tokens, parents, scores and the best of every request."""
    columns = {name: layer[name].tolist() for name in ("tokens", "parents", "scores")}
    best = [-INF] * len(columns["tokens"])
    for a, request in enumerate(layer["requests"].tolist()):
        rows: list[tuple[int, int, float]] = []
        for f, children in enumerate(layer["child_tokens"][a].tolist()):
            above, column = 0.0, -1
            if "parent_scores" in layer:
                above = layer["parent_scores"][a, f]
                column = layer["first_parent_column"] + int(layer["parent_columns"][a, f])
            for k, token in enumerate(children):
                score = float(above + layer["child_scores"][a, f, k])
                forbidden = math.isnan(score) or (k > 0 and bool(layer["chain_only"][request]))
                rows.append((token, column, -INF if forbidden else score))
        for name, values in zip(columns, zip(*rows, strict=True), strict=True):
            columns[name][request] = list(values)
        best[request] = max(score for _, _, score in rows)
    return columns["tokens"], columns["parents"], columns["scores"], best


@settings(max_examples=200, deadline=None)
@given(
    num_requests=st.integers(0, 5),
    parents=st.integers(1, 4),
    top_k=st.integers(1, 5),
    first=st.booleans(),
    seed=st.integers(),
)
def test_any_layer_is_written_as_by_the_obvious_version(
    num_requests: int, parents: int, top_k: int, first: bool, seed: int
) -> None:
    """NaN, infinities and chains included; whoever did not draft keeps what he has."""
    layer = random_layer(random.Random(seed), num_requests, parents, top_k, first=first)
    expected = obvious_layer(layer)
    best = ops.append_layer(**layer)
    written = (layer["tokens"], layer["parents"], layer["scores"], best)
    assert [tensor.tolist() for tensor in written] == list(expected)
    for name in ("tokens", "parents", "scores"):
        whole = layer[name]._base
        assert (whole[:, 0] == UNTOUCHED).all() and (whole[:, -2:] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("parents", torch.zeros(2, 4).int(), "parents must have size 3 in dimension 0"),
        ("scores", torch.zeros(3, 3), "scores must have size 4 in dimension 1"),
        ("requests", torch.tensor([0, 3]), "requests names request 3 of 3"),
        ("requests", torch.tensor([-1, 2]), "requests names request -1 of 3"),
        ("requests", torch.tensor([2, 0]), "requests must ascend, got 2 before 0"),
        ("requests", torch.tensor([0]), "child_tokens must have size 1 in dimension 0"),
        ("child_tokens", torch.zeros(2, 2, 3).int(), "2 parents with 3 children, .* 4 columns"),
        ("child_tokens", torch.zeros(2, 2, 2).int().mT, "child_tokens must be contiguous"),
        ("child_scores", torch.zeros(2, 1, 4), "child_scores must have size 2 in dimension 1"),
        ("child_scores", torch.zeros(2, 2, 2).mT, "child_scores must be contiguous"),
        ("chain_only", torch.zeros(2).bool(), "chain_only must have size 3"),
        ("parent_scores", torch.zeros(2, 1), "parent_scores must have size 2 in dimension 1"),
        ("parent_scores", torch.zeros(2, 4)[:, ::2].clone()[:1], "parent_scores must have size 2"),
        ("parent_scores", torch.zeros(2, 3)[:, :2], "parent_scores must be contiguous"),
        ("parent_scores", None, "must come together"),
        ("parent_columns", None, "must come together"),
        ("parent_columns", torch.zeros(2, 3).long()[:, :2], "parent_columns must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, message: str) -> None:
    """And nothing has been written."""
    layer = append_arguments()
    layer[name] = value
    before = layer["tokens"].clone()
    with pytest.raises(ValueError, match=f"append_layer: .*{message}"):
        ops.append_layer(**layer)
    assert torch.equal(layer["tokens"], before)
