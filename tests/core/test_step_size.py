# SPDX-License-Identifier: Apache-2.0
"""How many nodes pay: the size of a step that makes a token cheapest."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import randoms
from vllm_echo import ops
from vllm_echo.core.decision import Rule
from vllm_echo.reference import schedule as reference
from vllm_echo.reference.schedule import to_float32

many = settings(max_examples=150, deadline=None, derandomize=True)
Rows = Sequence[Sequence[float]]


def keys_of(scores: Rows, caps: Sequence[int]) -> torch.Tensor:
    """Of candidates with these scores; nothing else about them matters here."""
    width = max([1, *map(len, scores)])
    padded = [list(row) + [-math.inf] * (width - len(row)) for row in scores]
    values = torch.tensor(padded, dtype=torch.float32).view(len(scores), width)
    nothing = torch.zeros(values.shape, dtype=torch.int32)
    most = torch.tensor(caps, dtype=torch.int32)
    table = (nothing, nothing - 1, nothing + 1, values)
    return ops.order_trees(*table, most, most, torch.zeros(0), Rule.PRICE, True, width)[3]


def paying(
    scores: Rows, caps: Sequence[int], added_ms: Sequence[float], plain_ms: float = 20.0
) -> list[int]:
    keys = keys_of(scores, caps)
    added = torch.tensor(added_ms, dtype=torch.float64)
    return ops.admit_nodes(keys, ops.fastest_size(keys, added, len(scores), plain_ms)).tolist()


def random_question(source: random.Random, distinct: bool) -> tuple[Rows, list[int], list[float]]:
    """Scores, caps and what 0 to K nodes add, on any machine."""
    values = [0.0, -0.5, -0.5, -1.0, -2.0, -120.0]
    scores = [
        [
            to_float32(source.uniform(-4, 0)) if distinct else source.choice(values)
            for _ in range(source.randint(0, 4))
        ]
        for _ in range(source.randint(0, 4))
    ]
    caps = [source.randint(0, 4) for _ in scores]
    slopes = source.choices([0.0, 0.0, 0.5, 3.0], k=source.randint(0, 14))
    return scores, caps, [0.0, *itertools.accumulate(slopes)]


@many
@given(randoms, st.booleans())
def test_best_paying_agrees_with_the_reference(source: random.Random, distinct: bool) -> None:
    """Catches a size that is off by one, caps that are forgotten, and ties by anything but request
    order."""
    scores, caps, added_ms = random_question(source, distinct)

    def tokens_per_ms(nodes: int, accepted: float) -> float:
        return (len(scores) + accepted) / (20.0 + added_ms[nodes])

    expected = reference.best_paying(scores, caps, len(added_ms) - 1, tokens_per_ms)
    assert paying(scores, caps, added_ms) == expected


@many
@given(randoms, st.booleans())
def test_no_other_choice_of_nodes_is_faster(source: random.Random, distinct: bool) -> None:
    """The claim itself, by trying all choices: the greedy order misses nothing."""
    scores, caps, added_ms = random_question(source, distinct)
    possible = [[score for score in row if score > -120.0] for row in scores]
    chances = [[math.exp(score) for score in sorted(row, reverse=True)] for row in possible]

    def speed(counts: Sequence[int]) -> float:
        accepted = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        return (len(scores) + accepted) / (20.0 + added_ms[sum(counts)])

    most = [range(min(len(row), cap) + 1) for row, cap in zip(possible, caps, strict=True)]
    choices = [c for c in itertools.product(*most) if sum(c) < len(added_ms)]
    counts = paying(scores, caps, added_ms)
    assert tuple(counts) in choices
    assert speed(counts) == pytest.approx(max(map(speed, choices)), rel=1e-6)


def test_free_nodes_are_all_taken_and_impossible_ones_not() -> None:
    """A probability that underflows to 0 gains nothing, and may cost in the next step."""
    scores = [[-0.1, -3.0, -120.0], [-1.0], []]
    assert paying(scores, [8, 8, 8], [0.0] * 20) == [2, 1, 0]


def test_nothing_is_taken_where_nothing_pays() -> None:
    """Catches an argmax that knows no 0."""
    assert paying([[-0.1], [-0.1]], [8, 8], [0.0, 19.0, 38.0]) == [0, 0]


def test_an_even_deal_is_no_gain() -> None:
    """A node that exactly earns its cost is left alone: 1 token in 20 ms, or 2 in 40."""
    assert paying([[0.0]], [8], [0.0, 20.0]) == [0]
    assert paying([[0.0]], [8], [0.0, 19.9]) == [1]


def test_a_dear_first_node_may_pay_with_the_others() -> None:
    """Steps get slower in jumps (a tile, a cache line of rows): one node does not pay, four do.
    Catches a search that stops at the first loss."""
    scores = [[-0.1] * 4]
    assert paying(scores, [1], [0.0, 19.0]) == [0]
    assert paying(scores, [4], [0.0, 19.0, 19.0, 19.0, 19.0]) == [4]


def test_no_budget_and_no_request_take_nothing() -> None:
    assert paying([[-0.1]], [8], [0.0]) == [0]
    assert paying([[-0.1]], [0], [0.0, 0.0]) == [0]
    assert paying([], [], [0.0, 1.0]) == []


def test_equal_nodes_go_to_the_first_requests() -> None:
    """Catches an unstable sort among many ties: ranks would disagree."""
    scores = [[-0.5, -0.5]] * 300
    counts = paying(scores, [2] * 300, [0.0] * 101 + [1e9] * 500)
    assert counts == [2] * 50 + [0] * 250


def test_places_without_a_candidate_do_not_choose_the_size() -> None:
    """Where measured costs fall for once, a size that nobody can fill may look fast; three nodes
    would then be verified at the price of a slow size. One node is right here."""
    scores = [[-0.1, -0.2], [-3.0]]
    assert paying(scores, [2, 2], [0.0, 0.0, 20.0, 20.0, 0.0]) == [1, 0]
