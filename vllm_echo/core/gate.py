# SPDX-License-Identifier: Apache-2.0
"""Stage *gate*: may a request go deeper? (arXiv:2604.09603, sparse confidence gates.)"""

from dataclasses import dataclass, field, replace

import torch

from vllm_echo import ops
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.decision import Decision, Rule
from vllm_echo.core.tree import CandidateTrees


class SparseGates:
    """Thresholds on the confidence of a layer, at a few depths only.

    The gate at depth d judges the layer drafted *from* depth d: its confidence is
    c[d] = exp(max score of depth d + 1), the probability of the most likely path so far.
    c > threshold lets the request go deeper; otherwise it is truncated there, and costs
    no further draft work. Between gates there is no decision. The paper leaves open which
    layer a root gate looks at; see docs/algorithm.md for why it is this one.
    """

    def __init__(self, thresholds: dict[int, float]):
        self._thresholds = dict(sorted(thresholds.items()))

    @classmethod
    def from_config(cls, config: EchoConfig) -> "SparseGates":
        return cls({gate.depth: gate.threshold for gate in config.gates})

    def at_every_depth(self, max_depth: int) -> "SparseGates":
        """Dense gates: linear between the sparse ones, and as the nearest beyond them."""
        if not self._thresholds:
            return self
        depths = list(self._thresholds)
        dense = {}
        for depth in range(max_depth):
            low = max((d for d in depths if d <= depth), default=depths[0])
            high = min((d for d in depths if d >= depth), default=depths[-1])
            share = (depth - low) / (high - low) if high > low else 0.0
            dense[depth] = (1 - share) * self._thresholds[low] + share * self._thresholds[high]
        return SparseGates(dense)

    def with_threshold(self, threshold: float) -> "SparseGates":
        """The same gates, all with one threshold."""
        return SparseGates(dict.fromkeys(self._thresholds, threshold))

    def threshold(self, depth: int) -> float | None:
        """None where there is no gate."""
        return self._thresholds.get(depth)

    def by_depth(self, max_depth: int) -> tuple[float | None, ...]:
        """``Decision.thresholds``. A gate at ``max_depth`` has no layer to judge."""
        return tuple(self.threshold(depth) for depth in range(max_depth))


@dataclass
class Limits:
    """What bounds each of R requests in a step; known before drafting."""

    caps: torch.Tensor
    """[R] int32, most nodes."""
    deepest: torch.Tensor
    """[R] int32, last layer."""
    sampled: torch.Tensor
    """[R] bool, temperature above 0."""


@dataclass
class Growth:
    """What drafting has found out so far. R requests."""

    limits: Limits
    active: torch.Tensor
    """[R] bool, still going deeper: drafted for in the first layer, expanded for the next ones."""
    num_layers: torch.Tensor
    """[R] int32, layers that phase 1 has paid for, one node each."""
    truncated: torch.Tensor
    """[R] bool, cut by a gate (and not by the budget or by reaching its last depth)."""
    budget: int
    """Nodes that phase 1 has left."""
    passed: dict[int, int] = field(default_factory=dict)
    """Requests that passed the gate at a depth."""
    cut: dict[int, int] = field(default_factory=dict)
    """Requests that were truncated by the gate at a depth."""
    num_forwards: int = 0
    """Draft forwards, one a layer below the first."""
    num_expanded: int = 0
    """Nodes that they expanded."""

    @classmethod
    def begin(cls, limits: Limits, decision: Decision) -> "Growth":
        active = limits.caps > 0
        return cls(
            limits=limits,
            active=active,
            num_layers=torch.zeros_like(limits.caps),
            truncated=torch.zeros_like(active),
            budget=decision.budget,
        )


def go_deeper(
    decision: Decision, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """[R] bool, among ``growth.active``: whose nodes at ``depth`` + 1, just drafted, are expanded.

    Path ``scores`` [R, M] of that layer, the ``best`` of each request [R]. Under ``Rule.GATES``
    this is also phase 1 of the scheduler: ``growth`` is charged a node for each layer that is
    paid for. The other rules leave ``growth`` as it is.
    """
    if decision.rule is Rule.GATES:
        return _pay_for_layer(decision, growth, depth, best)
    if decision.rule is Rule.PRICE:
        return _expect_gain(decision, growth, depth, best)
    return _keep_beam(decision, growth, depth, scores, best)


def _pay_for_layer(
    decision: Decision, growth: Growth, depth: int, best: torch.Tensor
) -> torch.Tensor:
    threshold, limits = decision.thresholds[depth], growth.limits
    deeper, counts = ops.grant_layer(
        best,
        growth.active,
        limits.caps,
        limits.deepest,
        growth.num_layers,
        growth.truncated,
        depth,
        threshold,
        growth.budget,
    )
    passed, cut, granted = counts.tolist()
    if threshold is not None:
        growth.passed[depth], growth.cut[depth] = passed, cut
    growth.budget -= granted
    return deeper


def _expect_gain(
    decision: Decision, growth: Growth, depth: int, best: torch.Tensor
) -> torch.Tensor:
    """A layer is drafted when what it is expected to add is worth its forward."""
    if depth + 1 >= decision.max_depth:
        return torch.zeros_like(growth.active)
    prices, limits = decision.prices, growth.limits
    assert prices is not None
    return ops.expect_gain(
        best,
        growth.active,
        limits.deepest,
        limits.sampled,
        prices.best_child[depth + 1],
        depth,
        prices.price,
        prices.ms_per_token,
        prices.layer.each * decision.shape.frontier_widths[depth],
        prices.layer.fixed,
    )


def _keep_beam(
    decision: Decision, growth: Growth, depth: int, scores: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """Everybody, to its last layer; where a threshold stands, while the nodes that would be
    expanded hold more of the probability than that (arXiv:2409.00142)."""
    deeper = growth.active & (best > -torch.inf) & (depth + 1 < growth.limits.deepest)
    threshold = decision.thresholds[depth]
    if threshold is None:
        return deeper
    width = min(decision.shape.frontier_widths[depth], scores.shape[1])
    return deeper & (scores.topk(width, dim=1).values.exp().sum(dim=1) > threshold)


def layers_reached(candidates: CandidateTrees, limits: Limits, decision: Decision) -> Limits:
    """The ``limits`` of a draft loop that asks ``go_deeper`` after every layer, where all layers
    were drafted before anything was asked: ``deepest`` becomes the last layer that it would have
    drafted. Gates need no such answer: ``schedule.order_trees`` asks them itself.
    """
    if decision.rule is Rule.GATES:
        return limits
    growth = Growth.begin(limits, decision)
    reached = growth.active.to(limits.deepest.dtype)
    for depth in range(decision.max_depth - 1):
        first, end = decision.shape.layer_columns(depth + 1)
        scores = candidates.scores[:, first:end]
        if scores.shape[1] == 0:
            break  # there was nobody to draft it for
        growth.active = go_deeper(decision, growth, depth, scores, scores.amax(dim=1))
        reached += growth.active
    return replace(limits, deepest=reached)
