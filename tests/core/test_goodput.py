# SPDX-License-Identifier: Apache-2.0
"""The policy goodput: who goes deeper, and what whole steps come to."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import as_lists, randoms
from tests.core.machines import FREE, MACHINE
from tests.core.steps import UNLIMITED, Step, decide, random_step
from vllm_echo.core import gate
from vllm_echo.core.acceptance import AcceptanceModel, Calibration, uncalibrated
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import Line, StepLoad
from vllm_echo.core.policies import make_policy
from vllm_echo.reference.draft import Limits

many = settings(max_examples=150, deadline=None, derandomize=True)


CHILD = (0.5, 0.6, 0.8, 0.1)
CALIBRATION = Calibration(
    AcceptanceModel(((0.0, 1.0),), CHILD, uncalibrated().greedy.supply),
    AcceptanceModel(((0.0, 1.0),), tuple(c / 2 for c in CHILD), uncalibrated().greedy.supply),
)


def deeper(
    confidence: Sequence[float],
    price: float = 0.2,
    depth: int = 0,
    fixed: float = 0.0,
    each: float = 0.0,
    sampled: Sequence[bool] | None = None,
    active: Sequence[bool] | None = None,
    deepest: Sequence[int] | None = None,
) -> list[bool]:
    """Who goes deeper from ``depth``, of a policy with 4 layers and 2 children a node; a token
    costs 10 ms."""
    count = len(confidence)
    config = EchoConfig(
        policy="goodput",
        max_depth=4,
        top_k=2,
        profile=replace(FREE, layer=Line(fixed, each)),
        calibration=CALIBRATION,
    )
    offer = Offer(UNLIMITED, price=price, ms_per_token=10.0, plain_ms=20.0)
    decision = make_policy(config).decide(StepLoad(count), offer)
    limits = gate.Limits(
        caps=torch.full((count,), 8, dtype=torch.int32),
        deepest=torch.tensor(deepest or [8] * count, dtype=torch.int32),
        sampled=torch.tensor(sampled or [False] * count),
    )
    growth = gate.Growth.begin(limits, decision)
    growth.active = torch.tensor(active or [True] * count)
    values = torch.tensor(confidence)
    scores = torch.stack([values.log(), values.log() - 1], dim=1)
    return gate.go_deeper(decision, growth, depth, scores, values.log()).tolist()


def test_a_request_goes_deeper_when_its_next_node_beats_the_price() -> None:
    """From the root, the layer to be drafted is the second: its best child is accepted with 0.6."""
    assert deeper([0.32, 0.34, 0.9, 0.0], price=0.2) == [False, True, True, False]
    assert deeper([0.24, 0.26], price=0.2, depth=1) == [False, True], "0.8 at depth 3"
    assert deeper([1.0, 1.0], price=0.2, depth=2) == [False, False], "0.1 at depth 4"


def test_each_kind_of_request_expects_its_own_child() -> None:
    assert deeper([0.5, 0.5], price=0.2, sampled=[False, True]) == [True, False]


def test_the_forward_itself_has_to_be_earned() -> None:
    """10 ms a token, 0.9 * 0.6 - 0.2 = 0.34 tokens: 3.4 ms, less 0.5 ms for each of two nodes."""
    assert deeper([0.9], each=0.5, fixed=2.3) == [True]
    assert deeper([0.9], each=0.5, fixed=2.5) == [False]
    assert deeper([0.9] * 3, each=0.5, fixed=2.5) == [True] * 3, "shared by three"
    assert deeper([0.9] * 3, each=1.8, fixed=0.0) == [False] * 3


def test_who_has_stopped_neither_comes_back_nor_helps_to_pay() -> None:
    assert deeper([0.9, 0.9], active=[True, False]) == [True, False]
    assert deeper([0.9, 0.9], active=[True, False], fixed=3.5) == [False, False]
    assert deeper([0.9, 0.9], fixed=3.5) == [True, True]
    assert deeper([0.9, 0.9], fixed=3.5, deepest=[1, 8]) == [False, False]
    assert deeper([0.9, 0.9], deepest=[1, 8]) == [False, True]


def test_nobody_goes_deeper_than_the_last_layer() -> None:
    assert deeper([0.9, 0.9], price=0.0, depth=3) == [False, False]


@many
@given(st.lists(st.floats(0, 1, width=32), min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_price_sends_nobody_deeper(
    confidence: list[float], price: float, more: float
) -> None:
    """Load raises the price; catches a comparison the wrong way round."""
    cheap = deeper(confidence, price, fixed=0.5)
    dear = deeper(confidence, price + more, fixed=0.5)
    assert all(before or not after for before, after in zip(cheap, dear, strict=True))


def test_requests_at_their_limit_do_not_help_to_pay_for_a_forward() -> None:
    """Nine requests without draft slots expect a gain that they can never have: the forward then
    runs for one request, which alone is not worth it."""
    config = EchoConfig(
        policy="goodput", profile=replace(FREE, layer=Line(5.0, 0.0)), calibration=CALIBRATION
    )
    limits = (Limits(8), *[Limits(8, can_expand=False)] * 9)
    step = Step(config, limits, seed=0, kind="plain", budget=UNLIMITED)
    offer = Offer(100, price=0.1, ms_per_token=10.0, plain_ms=20.0)

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        return [(token, -0.125 - 3 * token) for token in range(8)]

    alone = replace(step, limits=limits[:1])
    assert decide(alone, children, offer).forwards == []
    assert decide(step, children, offer).forwards == []


@many
@given(randoms)
def test_a_free_machine_verifies_all_that_it_drafts(source: random.Random) -> None:
    """With nothing to pay and a head that is taken at its word, goodput is the static tree of
    full depth: catches a rule that holds back where nothing is to be gained by it."""
    step = random_step(source, policy="goodput", kind="distinct", transfer=True, budget=UNLIMITED)
    config = replace(step.config, profile=FREE, calibration=None)
    offer = Offer(UNLIMITED, price=0.0, ms_per_token=10.0, plain_ms=20.0)
    mine = decide(replace(step, config=config), offer=offer)
    static = replace(config, policy="static", target_depth=config.max_depth)
    other = decide(replace(step, config=static))
    assert mine.counts == other.counts
    for one, two in zip(as_lists(mine.trees), as_lists(other.trees), strict=True):
        assert sorted((token, depth) for token, _, depth in one) == sorted(
            (token, depth) for token, _, depth in two
        )


def test_load_takes_nodes_from_everybody_and_in_the_end_all_of_them() -> None:
    """The elastic promise in one picture: the same requests, more and more of them."""
    config = EchoConfig(policy="goodput", profile=MACHINE)

    def nodes_of_one(requests: int) -> float:
        step = Step(config, (Limits(8),) * requests, seed=1, kind="plain", budget=UNLIMITED)
        return sum(decide(step).counts) / requests

    shares = [nodes_of_one(requests) for requests in (2, 8, 16, 32, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 2 and shares[-1] == 0


@many
@given(randoms)
def test_what_is_not_taken_would_not_have_paid(source: random.Random) -> None:
    """One node more, the best that is left, makes the step no faster."""
    step = random_step(source, policy="goodput", kind="distinct", transfer=True)
    decision, offer = decide(step), step.offer()
    counts, load = decision.counts, step.load
    if sum(counts) == offer.num_nodes:
        return
    left = []
    accepted = 0.0
    for row, count, cap in zip(decision.candidates.scores, counts, decision.caps, strict=True):
        chances = row.exp().sort(descending=True).values.tolist()
        accepted += sum(chances[:count])
        left += chances[count:cap]

    def speed(nodes: int, gained: float) -> float:
        assert step.config.profile is not None
        time = offer.plain_ms + step.config.profile.nodes_ms(load, nodes)
        return (load.num_requests + gained) / time

    now = speed(sum(counts), accepted)
    assert speed(sum(counts) + 1, accepted + max([0.0, *left])) <= now * (1 + 1e-6)
