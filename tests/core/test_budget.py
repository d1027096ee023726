# SPDX-License-Identifier: Apache-2.0
"""K_max under load: what a step may spend, and when drafting does not pay at all."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_echo.core.budget as budget_module
from tests.core.kit import randoms
from tests.core.machines import FREE, MACHINE, random_curve
from tests.core.steps import UNLIMITED, Step, decide
from vllm_echo.core.acceptance import AcceptanceModel, Calibration, SupplyPoint, uncalibrated
from vllm_echo.core.budget import LEAST_GAIN, NOTHING, ElasticBudget
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.policies import make_policy
from vllm_echo.core.shape import TreeShape
from vllm_echo.reference.draft import Limits

many = settings(max_examples=60, deadline=None, derandomize=True)
NO_CAP = 1 << 20
DRAFTING = dict(zip(("roots", "layer", "catch_up", "control"), [Line(0.1, 0.01)] * 4, strict=True))
QUADRATIC = CostCurve(tuple((n, 20 + n * n / 200) for n in range(1, 600, 4)), **DRAFTING)
HINGE = CostCurve(((1, 20.0), (32, 20.0), (512, 260.0)), **DRAFTING)
LOADS = [StepLoad(n, prefill, 100 * n) for n in (1, 3, 8, 40, 200) for prefill in (0, 40, 700)]


LARGE = TreeShape(max_depth=8, top_k=9, frontier_widths=(1,) * 7)
"""Trees that hold whatever a head offers; one node of a layer is expanded."""


def budget_of(
    curve: CostCurve,
    calibration: Calibration | None = None,
    most: int = NO_CAP,
    shape: TreeShape = LARGE,
    nodes_per_request: int = NO_CAP,
) -> ElasticBudget:
    return ElasticBudget(curve, calibration or uncalibrated(), shape, nodes_per_request, most)


def head_that_offers(*points: SupplyPoint, best_child: float = 0.5) -> Calibration:
    model = AcceptanceModel(((0.0, 1.0),), (best_child,), points)
    return Calibration(model, model)


def simulated_ms(
    curve: CostCurve, load: StepLoad, point: SupplyPoint, nodes: float, shape: TreeShape
) -> float:
    """The mean time of a step, by going through every way in which it can turn out: who takes part
    in which layer, each request on its own."""
    requests, total = load.num_requests, 0.0
    layers = [list(itertools.product((False, True), repeat=requests)) for _ in point.layers]
    for turns in itertools.product(*layers):
        chance, ms = 1.0, curve.catch_up(requests) + curve.roots(requests) + curve.control.fixed
        for takes_part, share, width in zip(
            turns, point.layers, shape.frontier_widths, strict=False
        ):
            for does in takes_part:
                chance *= share if does else 1 - share
            expanded = sum(takes_part) * width
            ms += curve.layer(expanded) if expanded else 0.0
        total += chance * ms
    rows = load.num_rows
    each = curve.control.each + curve.node_context_us / 1000 * load.num_context_tokens / requests
    added = curve.step_ms(rows + nodes) - curve.step_ms(rows) + each * nodes
    context = curve.context_us / 1000 * load.num_context_tokens
    return total + max(0.0, added) + curve.step_ms(requests) + context


@settings(max_examples=40, deadline=None, derandomize=True)
@given(randoms, st.sampled_from([1, 3, NO_CAP]))
def test_the_offer_is_the_fastest_of_all_that_can_be_drawn(
    source: random.Random, most: int
) -> None:
    """Small cases, each simulated step by step. Catches layers that are charged for one request or
    one node only, milliseconds and tokens that count twice, and supply that no tree can hold."""
    curve = random_curve(source)
    requests, depth, cap = source.randint(1, 3), source.randint(1, 3), source.choice([2, 9])
    shape = TreeShape(depth, 3, tuple(source.randint(1, 3) for _ in range(depth - 1)))
    # Rounded loads, so that the answer is that of the load itself.
    load = StepLoad(requests, 32 * source.randint(0, 3), 128 * requests * source.randint(0, 9))
    points = [
        SupplyPoint(price, d * source.uniform(0.2, 2), d * source.random() / 2, (0.9, 0.5)[: d - 1])
        for price in (0.1, 0.5)
        for d in (1, 2, 3)
    ]
    plain = simulated_ms(curve, load, SupplyPoint(0, 0, 0, ()), 0, shape)
    plain -= curve.catch_up(requests) + curve.roots(requests) + curve.control.fixed
    expected: list[tuple[float, SupplyPoint | None]] = [(plain / requests / LEAST_GAIN, None)]
    for point in points:
        nodes = min(most, requests * min(cap, point.nodes, shape.num_candidates))
        if point.depth <= depth and nodes >= 0.5:
            tokens = requests + point.accepted * nodes / point.nodes
            expected.append((simulated_ms(curve, load, point, nodes, shape) / tokens, point))
    ms_per_token, best = min(expected, key=lambda found: found[0])

    offer = budget_of(curve, head_that_offers(*points), most, shape, cap).offer(load)

    assert (offer == NOTHING) == (best is None)
    if best is not None:
        assert offer.ms_per_token == pytest.approx(ms_per_token)
        assert (offer.price, offer.depth) == (best.price, best.depth)
        assert 0 < offer.num_nodes <= min(most, requests * cap)


@pytest.mark.parametrize("policy", ["static", "chain"])
def test_a_layer_costs_what_drafting_expands(policy: str) -> None:
    """Everybody goes all the way: the price of that is what was drafted, counted. Catches one node
    a layer, where trees of three are expanded."""
    config = EchoConfig(policy=policy, k_max=NO_CAP, gates=())
    step = Step(config, (Limits(8),) * 5, 0, "plain", UNLIMITED)
    growth = decide(step).growth
    layers = config.target_depth - 1
    assert growth.num_forwards == layers
    assert growth.num_expanded == 5 * layers or policy == "static"
    curve = replace(MACHINE, layer=Line(0.3, 0.02))
    shape = make_policy(config).shape
    everybody = SupplyPoint(0.1, 4.0, 2.0, (1.0,) * layers)
    start = curve.roots(5) + curve.catch_up(5) + curve.control.fixed
    expected = start + 0.3 * growth.num_forwards + 0.02 * growth.num_expanded
    found = budget_of(curve, shape=shape).drafting_ms(StepLoad(5), everybody)
    assert found == pytest.approx(expected)


def test_an_offer_is_no_deeper_and_no_larger_than_the_trees() -> None:
    """Catches K_max and a price that rest on tokens which cannot come."""
    shallow = TreeShape(1, 3, ())
    assert budget_of(FREE).offer(StepLoad(4)).depth > 1
    offer = budget_of(FREE, shape=shallow).offer(StepLoad(4))
    assert offer.depth == 1
    assert 0 < offer.num_nodes <= 4 * 3
    assert budget_of(FREE, nodes_per_request=2).offer(StepLoad(4)).num_nodes == 8
    chain = TreeShape(2, 1, (1,))
    greedy = SupplyPoint(0.1, 6.0, 3.0, (0.9,))
    assert budget_of(FREE, head_that_offers(greedy), shape=chain).offer(StepLoad(1)).num_nodes == 2


@many
@given(st.integers(0, 2**32))
def test_a_requests_share_shrinks_as_requests_come_and_stays_0(seed: int) -> None:
    """The elastic rule: on a machine whose rows get dearer, more requests means fewer nodes each
    (within the rounding of the sum), and once drafting does not pay it pays never again.

    The sum itself may grow with the first requests: one request alone has few good candidates.
    A draft forward's fixed cost would weigh less on many requests, so there is none here.
    """
    curve = random_curve(random.Random(seed))
    names = ("roots", "layer", "catch_up", "control")
    curve = replace(curve, **{name: Line(0.0, getattr(curve, name).each) for name in names})
    budget = budget_of(curve)
    offers = [budget.offer(StepLoad(requests)).num_nodes for requests in range(1, 257)]
    for requests, (fewer, more) in enumerate(zip(offers, offers[1:], strict=False), start=1):
        if fewer:
            assert (more - 0.5) / (requests + 1) <= (fewer + 0.5) / requests + 1e-9
        else:
            assert more == 0


@pytest.mark.parametrize("curve", [QUADRATIC, HINGE, MACHINE])
def test_k_max_falls_from_its_peak_to_0(curve: CostCurve) -> None:
    """Catches a budget that only ever grows with the number of requests."""
    offers = [budget_of(curve).offer(StepLoad(n)).num_nodes for n in (1, 2, 4, 8, 16, 32, 64, 256)]
    peak = offers.index(max(offers))
    assert offers[:peak] == sorted(offers[:peak])
    assert offers[peak:] == sorted(offers[peak:], reverse=True)
    assert offers[0] > 0 == offers[-1]


@many
@given(randoms, st.integers(1, 64))
def test_prompts_make_no_offer_better(source: random.Random, requests: int) -> None:
    """Rows of prompts push the step up the curve before the first candidate. The number of nodes
    may even rise then (wider instead of deeper), but a token never gets cheaper."""
    curve = random_curve(source)
    budget = budget_of(curve)
    offers = [budget.offer(StepLoad(requests, rows)) for rows in range(0, 700, 32)]
    plain = curve.plain_ms(StepLoad(requests)) / requests
    costs = [offer.ms_per_token if offer.num_nodes else plain for offer in offers]
    for more, fewer in zip(costs[1:], costs, strict=False):
        assert more >= fewer - 1e-9


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16])
def test_prompts_take_from_the_budget(requests: int) -> None:
    budget = budget_of(QUADRATIC)
    offers = [budget.offer(StepLoad(requests, rows)).num_nodes for rows in range(0, 700, 32)]
    assert offers == sorted(offers, reverse=True)
    assert offers[0] > offers[-1]


def test_long_contexts_take_from_the_budget() -> None:
    """A candidate attends to its request's whole context; catches a cost that is left out."""
    budget = budget_of(replace(QUADRATIC, context_us=2.0, node_context_us=2.0))
    offers = [budget.offer(StepLoad(4, 0, 4 * n)).num_nodes for n in (0, 500, 1000, 4000, 16000)]
    assert offers == sorted(offers, reverse=True)
    assert offers[0] > offers[-1]


def test_dear_drafting_does_not_pay() -> None:
    """Catches a budget that counts verification and forgets the head's own forwards."""
    for name in ("roots", "catch_up", "control", "layer"):
        dear = replace(MACHINE, **{name: Line(500.0, 0.0)})
        offer = budget_of(dear).offer(StepLoad(8))
        assert offer == NOTHING or name == "layer"
    assert budget_of(MACHINE).offer(StepLoad(8)) != NOTHING


def test_a_dear_layer_leaves_what_needs_none() -> None:
    """Where layers cost too much, first candidates may pay: they come without one."""
    first_only = SupplyPoint(0.5, 1.0, 0.7, (0.0, 0.0))
    deeper = SupplyPoint(0.2, 3.0, 1.5, (0.9, 0.7))
    head = head_that_offers(deeper, first_only)
    cheap, dear = budget_of(MACHINE, head), budget_of(replace(MACHINE, layer=Line(9.0, 0.0)), head)
    assert cheap.offer(StepLoad(2)).num_nodes == 6
    assert dear.offer(StepLoad(2)).num_nodes == 2


@many
@given(randoms, st.integers(1, 256), st.integers(0, 2000))
def test_an_offer_is_no_slower_than_plain_decoding(
    source: random.Random, requests: int, prefill: int
) -> None:
    curve = random_curve(source)
    load = StepLoad(requests, 32 * (prefill // 32))
    offer = budget_of(curve).offer(load)
    if offer.num_nodes:
        assert offer.ms_per_token < curve.plain_ms(load) / requests / LEAST_GAIN
        assert offer.plain_ms >= curve.plain_ms(load)
        assert 0 < offer.price < 1


@pytest.mark.parametrize("curve", [QUADRATIC, MACHINE, FREE])
def test_the_price_of_a_node_is_a_probability_and_rises_with_load(curve: CostCurve) -> None:
    """Catches a price that no candidate can ever reach, and one that nothing reaches below."""
    offers = [budget_of(curve).offer(StepLoad(n)) for n in (1, 4, 16)]
    prices = [offer.price for offer in offers if offer.num_nodes]
    assert len(prices) >= 2
    assert all(0 <= price <= 1 for price in prices)
    assert prices == sorted(prices)


AT_THE_KNEE = CostCurve(((1, 20.0), (32, 20.0), (64, 1000.0)), *[Line(0.0, 0.0)] * 4)


def test_a_budget_that_ends_at_the_knee_has_a_price_below_1() -> None:
    """24 nodes are free, the 25th costs more than a token does: those 24 have a price of less than
    a sure token, or goodput would go no deeper than layer 1 for them."""
    offer = budget_of(AT_THE_KNEE, most=24).offer(StepLoad(8))
    assert offer.num_nodes == 24
    assert offer.price <= 1


def test_a_budget_that_the_knee_keeps_small_has_a_price_above_0() -> None:
    """16 requests get 16 nodes or so since the knee is near: a poor node is not worth one of
    them."""
    offer = budget_of(HINGE).offer(StepLoad(16))
    assert 8 < offer.num_nodes < 24
    assert offer.price > 0.05


def test_a_free_machine_offers_all_that_the_head_supplies() -> None:
    """Where nothing costs, everything pays: the supply at the lowest price and to the greatest
    depth, for each request."""
    most = max(uncalibrated().greedy.supply, key=lambda point: point.accepted)
    assert most.nodes > 4
    assert most.price == uncalibrated().greedy.supply[0].price
    for requests in (1, 7, 256):
        offer = budget_of(FREE).offer(StepLoad(requests))
        assert offer.num_nodes == round(requests * most.nodes)
        assert (offer.price, offer.depth) == (most.price, most.depth)


def test_dear_layers_make_offers_shallow() -> None:
    """Catches a depth that the head's cost does not reach, and one that is not passed on."""
    depths = []
    for fixed in (0.0, 0.5, 2.0, 50.0):
        curve = replace(MACHINE, layer=Line(fixed, 0.0))
        depths.append(budget_of(curve).offer(StepLoad(2)).depth)
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 3
    assert depths[-1] == 1


def test_a_free_machine_offers_no_more_than_k_max() -> None:
    assert budget_of(FREE, most=5).offer(StepLoad(7)).num_nodes == 5
    assert budget_of(FREE, most=0).offer(StepLoad(7)) == NOTHING


@pytest.mark.parametrize("requests", [1, 2, 8, 64, 256])
def test_a_poor_head_never_drafts(requests: int) -> None:
    """A head that knows nothing supplies next to nothing at any price, at any load."""
    poor = head_that_offers(*(SupplyPoint(p / 20, 1e-3, 1e-4, (0.0,)) for p in range(1, 20)))
    for curve in (MACHINE, QUADRATIC, HINGE):
        for prefill in (0, 100):
            assert budget_of(curve, poor).offer(StepLoad(requests, prefill)) == NOTHING


@pytest.mark.parametrize(("nodes", "offered"), [(0.3, 0), (0.49, 0), (0.5, 1), (1.4, 1)])
def test_less_than_half_a_node_is_none(nodes: float, offered: int) -> None:
    """Catches an offer of 0 nodes that drafts all the same, and one of a node nobody supplies."""
    offer = budget_of(FREE, head_that_offers(SupplyPoint(0.5, nodes, 0.3, ()))).offer(StepLoad(1))
    assert offer.num_nodes == offered
    assert (offer == NOTHING) == (offered == 0)


def test_no_request_is_offered_nothing() -> None:
    assert budget_of(FREE).offer(StepLoad(0)) == NOTHING
    assert budget_of(FREE).offer(StepLoad(0, num_prefill_tokens=500)) == NOTHING


def test_every_instance_offers_the_same_in_any_order() -> None:
    """Ranks see the same loads, but an answer must not depend on which came first."""
    one, other = budget_of(MACHINE), budget_of(MACHINE)
    first = {load: one.offer(load, load.num_requests // 2) for load in LOADS}
    second = {load: other.offer(load, load.num_requests // 2) for load in reversed(LOADS)}
    assert first == second
    assert first == {load: one.offer(load, load.num_requests // 2) for load in LOADS}
    assert len(set(first.values())) > 3


def test_sampled_requests_shrink_the_budget_of_a_head_that_is_worse_for_them() -> None:
    """Catches a calibration by kind that is read for one kind only."""
    good = uncalibrated().greedy
    worse = [replace(p, nodes=p.nodes / 10, accepted=p.accepted / 10) for p in good.supply]
    budget = budget_of(FREE, Calibration(good, replace(good, supply=tuple(worse))))
    offers = [budget.offer(StepLoad(8), sampled).num_nodes for sampled in (0, 2, 4, 6, 8)]
    assert offers == sorted(offers, reverse=True)
    most = 8 * max(point.nodes for point in good.supply)
    assert [offers[0], offers[-1]] == [round(most), round(most / 10)]
    assert offers[2] == pytest.approx((offers[0] + offers[-1]) / 2, abs=1)


def test_kinds_of_unlike_supply_are_not_mixed() -> None:
    """Two tables of other prices cannot be mixed point by point; the more frequent kind rules."""
    first, other = SupplyPoint(0.1, 3.0, 1.0, (0.5,)), SupplyPoint(0.2, 2.0, 0.8, (0.5,))
    models = [AcceptanceModel(((0.0, 1.0),), (0.5,), (point,)) for point in (first, other)]
    budget = budget_of(FREE, Calibration(*models))
    offers = [budget.offer(StepLoad(8), sampled).num_nodes for sampled in (0, 2, 6, 8)]
    assert offers == [24, 24, 16, 16]


@many
@given(randoms, st.integers(1, 300), st.integers(0, 900), st.integers(0, 700))
def test_the_table_of_added_costs_is_the_curve(
    source: random.Random, requests: int, prefill: int, most: int
) -> None:
    """Catches a table that is read beyond its end or from a wrong row on, also where a fit finds
    a node cheaper than a row."""
    curve = replace(random_curve(source), control=Line(0.0, source.choice([0.02, 0.0, -0.05])))
    load = StepLoad(requests, prefill, 300 * requests)
    added = budget_of(curve).added_ms(load, most)
    assert added.shape == (most + 1,)
    assert added.dtype == torch.float64
    expected = [curve.nodes_ms(load, nodes) for nodes in range(most + 1)]
    assert added.tolist() == pytest.approx(expected, abs=1e-9)


def test_answers_are_kept_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server of mixed traffic that keeps an offer for every load it has ever seen."""
    monkeypatch.setattr(budget_module, "_MOST_OFFERS", 3)
    budget = budget_of(MACHINE)
    loads = [StepLoad(n, 0, 100 * n) for n in range(1, 9)]
    first = [budget.offer(load) for load in loads]
    assert len(budget._answer.offers) <= 3
    assert [budget.offer(load) for load in loads] == first
    assert budget.offer(loads[-1]) is budget.offer(loads[-1])


def test_a_curve_that_comes_back_is_still_known() -> None:
    """Loads take turns, and each decides by a curve of its own. Catches answers of one curve that
    are given for another, and curves that are kept without end."""
    budget = budget_of(FREE)
    load = StepLoad(4, 0, 400)
    free, added = budget.offer(load), budget.added_ms(load, 8).tolist()
    budget.follow(QUADRATIC)
    assert budget.offer(load) == budget_of(QUADRATIC).offer(load) != free
    assert budget.added_ms(load, 8).tolist() != added
    budget.follow(FREE)
    assert budget.offer(load) is free
    assert budget.added_ms(load, 8).tolist() == added
    for ms in range(1, 200):
        budget.follow(replace(FREE, step=((1, float(ms)),)))
    assert len(budget._answers) <= budget_module._MOST_CURVES
