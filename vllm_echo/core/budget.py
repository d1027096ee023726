# SPDX-License-Identifier: Apache-2.0
"""What a step may spend: K_max from the cost curve, the load, and what candidates are worth.

A step's time per output token is

    ms_per_token = (plain step + drafting + candidates) / (requests + accepted candidates)

and a candidate pays exactly when its acceptance probability is above its *price*, the
milliseconds that it adds over the milliseconds that a token costs. As load grows a candidate
costs more and a token less, so the price rises, and K_max falls, to 0 where nothing pays.

The paper gives a constant K_max for a machine; the elastic one follows from its own cost
model once a step's own rows count. Depends on load, configuration and curve only, never on a
clock: equal input gives an equal budget. Which curve holds is `watch`'s business.
"""

from dataclasses import dataclass

import torch

from vllm_echo.core.acceptance import Calibration, SupplyPoint
from vllm_echo.core.config import MAX_NODES_PER_REQUEST
from vllm_echo.core.cost import CostCurve, StepLoad
from vllm_echo.core.shape import TreeShape


@dataclass(frozen=True)
class Offer:
    """The budget of one step."""

    num_nodes: int
    """K_max: most nodes of the step; 0 says that drafting does not pay."""
    price: float = 0.0
    """Acceptance probability from which a node pays; 0 where the budget is a constant."""
    ms_per_token: float = 0.0
    """Predicted milliseconds of the step for each output token; 0 where it is a constant."""
    plain_ms: float = 0.0
    """Milliseconds of the step before any candidate is verified."""
    depth: int = MAX_NODES_PER_REQUEST
    """Deepest layer that is expected to be worth its forward."""


NOTHING = Offer(0)

LEAST_GAIN = 1.01
"""How much faster than plain decoding an offer must promise to be: where it is next to nothing,
plain decoding is sure, and a curve and a calibration err."""


_CONTEXT_STEP = 64
_PREFILL_STEP = 32
_SHARES = 4
_FIRST_TABLE = 512
_MOST_OFFERS = 4096
_MOST_CURVES = 64


@dataclass
class _Answers:
    """What one curve has been asked."""

    offers: dict[tuple[int, int, int, int], Offer]
    step_ms: torch.Tensor
    """[n] float64: a step of 0, 1, ... rows."""


class ElasticBudget:
    """K_max as a function of load. Answers are kept: loads come again.

    No more than ``max_nodes`` nodes are offered to a step, nor more than ``nodes_per_request`` to a
    request, and only what trees of ``shape`` can hold. A head's supply is that of the top_k that it
    was calibrated with.
    """

    def __init__(
        self,
        curve: CostCurve,
        calibration: Calibration,
        shape: TreeShape,
        nodes_per_request: int,
        max_nodes: int,
    ):
        self._calibration = calibration
        self._shape = shape
        self._most_each = min(nodes_per_request, shape.num_candidates)
        self._max_nodes = max_nodes
        self._answers: dict[CostCurve, _Answers] = {}
        self.follow(curve)

    def follow(self, curve: CostCurve) -> None:
        """Decide by ``curve`` from now on. What another one answered is kept for its return."""
        self.curve = curve
        if curve not in self._answers:
            if len(self._answers) >= _MOST_CURVES:
                self._answers.clear()
            table = [curve.step_ms(n) for n in range(_FIRST_TABLE)]
            self._answers[curve] = _Answers({}, torch.tensor(table, dtype=torch.float64))
        self._answer = self._answers[curve]

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        """The budget that is worth most for ``load``; ``num_sampled`` of its requests sample."""
        if load.num_requests == 0:
            return NOTHING
        requests = load.num_requests
        key = (
            requests,
            -(-load.num_prefill_tokens // _PREFILL_STEP),
            round(load.num_context_tokens / (requests * _CONTEXT_STEP)),
            round(_SHARES * num_sampled / requests),
        )
        offers = self._answer.offers
        if key not in offers:
            if len(offers) >= _MOST_OFFERS:
                offers.clear()
            rounded = StepLoad(requests, key[1] * _PREFILL_STEP, key[2] * requests * _CONTEXT_STEP)
            offers[key] = self._best_offer(rounded, key[3] / _SHARES)
        return offers[key]

    def _best_offer(self, load: StepLoad, share_sampled: float) -> Offer:
        best = self.curve.plain_ms(load) / load.num_requests / LEAST_GAIN
        offer = NOTHING
        for point in self._supply(share_sampled):
            each = min(point.nodes, self._most_each)
            nodes = min(float(self._max_nodes), load.num_requests * each)
            if nodes < 0.5:
                continue
            # The best come first: a share of the nodes holds at least that share of the tokens.
            accepted = point.accepted * nodes / point.nodes
            before = self.curve.plain_ms(load) + self.drafting_ms(load, point)
            time = before + self.curve.nodes_ms(load, nodes)
            ms_per_token = time / (load.num_requests + accepted)
            if ms_per_token < best:
                best = ms_per_token
                offer = Offer(max(1, round(nodes)), point.price, ms_per_token, before, point.depth)
        return offer

    def drafting_ms(self, load: StepLoad, point: SupplyPoint) -> float:
        """Expected milliseconds of drafting for the load's requests."""
        requests = load.num_requests
        curve = self.curve
        layers = sum(1 - (1 - chance) ** requests for chance in point.layers)
        widths = zip(point.layers, self._shape.frontier_widths, strict=False)
        nodes = requests * sum(chance * width for chance, width in widths)
        time = curve.roots(requests) + curve.catch_up(requests) + curve.control.fixed
        return time + curve.layer.fixed * layers + curve.layer.each * nodes

    def added_ms(self, load: StepLoad, most: int) -> torch.Tensor:
        """[most + 1] float64: ``CostCurve.nodes_ms`` for 0 to ``most`` nodes."""
        start, answer = load.num_rows, self._answer
        while answer.step_ms.shape[0] <= start + most:
            more = range(answer.step_ms.shape[0], 2 * answer.step_ms.shape[0])
            grown = torch.tensor([self.curve.step_ms(n) for n in more], dtype=torch.float64)
            answer.step_ms = torch.cat([answer.step_ms, grown])
        added = answer.step_ms[start : start + most + 1] - answer.step_ms[start]
        own = self.curve.per_node_ms(load) * torch.arange(most + 1, dtype=torch.float64)
        return (added + own).clamp_(min=0)

    def _supply(self, share_sampled: float) -> list[SupplyPoint]:
        greedy, sampled = (
            {(p.price, p.depth): p for p in model.supply if p.depth <= self._shape.max_depth}
            for model in self._calibration.models()
        )
        if share_sampled == 0 or greedy.keys() != sampled.keys():
            return list((greedy if share_sampled < 0.5 else sampled).values())
        return [_mix(greedy[key], sampled[key], share_sampled) for key in greedy]


def _mix(a: SupplyPoint, b: SupplyPoint, share: float) -> SupplyPoint:
    def between(x: float, y: float) -> float:
        return x * (1 - share) + y * share

    return SupplyPoint(
        price=a.price,
        nodes=between(a.nodes, b.nodes),
        accepted=between(a.accepted, b.accepted),
        layers=tuple(between(x, y) for x, y in zip(a.layers, b.layers, strict=True)),
    )
