# SPDX-License-Identifier: Apache-2.0
"""Stages *draft*, *gate* and *schedule*, the obvious version: a step's whole decision.

The draft model is a function from a request and a path of tokens to that path's children, best
first. Arithmetic is that of float32, one rounding per addition and one for exp.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_echo.core.acceptance import uncalibrated
from vllm_echo.core.budget import Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.reference.schedule import (
    ROOT,
    Node,
    best_first,
    best_paying,
    even_caps,
    grant_layer,
    grant_width,
    probability,
    share_evenly,
    take_best,
    to_float32,
)

Children = Callable[[int, tuple[int, ...]], Sequence[tuple[int, float]]]
"""(request, path) -> (token, score) of each child, best first: log of its probability, or what
the policy goodput makes of it (reference/score.py)."""

GATED = ("echo", "dense", "fixed-threshold")


class Limits(NamedTuple):
    """What the engine allows a request, and whether it samples."""

    max_nodes: int
    can_expand: bool = True
    chain_only: bool = False
    max_depth: int = 255
    sampled: bool = False


@dataclass
class Candidates:
    """One request's drafted nodes and what became of it in phase 1."""

    nodes: list[Node] = field(default_factory=list)
    layer: list[int] = field(default_factory=list)
    """The nodes of its deepest layer."""
    num_layers: int = 0
    truncated: bool = False

    @property
    def confidence(self) -> float:
        return probability(max(self.nodes[index].score for index in self.layer))


@dataclass
class Step:
    """What a step's decision depends on, and how far it has come."""

    config: EchoConfig
    limits: Sequence[Limits]
    offer: Offer
    load: StepLoad
    requests: list[Candidates]
    caps: list[int]
    max_depth: int
    widths: list[int]
    budget: int


def propose_trees(
    children: Children,
    limits: Sequence[Limits],
    config: EchoConfig,
    offer: Offer,
    load: StepLoad,
) -> list[list[Node]]:
    """The next step's tree of each request, at most ``offer.num_nodes`` nodes in all."""
    step = grow_trees(children, limits, config, offer, load)
    counts = _spend(step)
    return [take_best(r.nodes, count) for r, count in zip(step.requests, counts, strict=True)]


def _spend(step: Step) -> list[int]:
    config, requests, caps = step.config, step.requests, step.caps
    scores = [[node.score for node in request.nodes] for request in requests]
    layers = [request.num_layers for request in requests]
    if config.policy in GATED:
        truncated = [request.truncated for request in requests]
        return grant_width(scores, truncated, layers, caps, step.budget) if config.width else layers
    if config.policy == "goodput":
        curve = config.profile
        assert curve is not None

        def tokens_per_ms(nodes: int, accepted: float) -> float:
            added = curve.nodes_ms(step.load, nodes)
            return (step.load.num_requests + accepted) / (step.offer.plain_ms + added)

        return best_paying(scores, caps, step.budget, tokens_per_ms) if step.budget else layers
    return share_evenly(
        [min(len(s), cap) for s, cap in zip(scores, caps, strict=True)], step.budget
    )


def grow_trees(
    children: Children,
    limits: Sequence[Limits],
    config: EchoConfig,
    offer: Offer,
    load: StepLoad,
) -> Step:
    """Everything drafted, and the budget that phase 1 left."""
    max_depth = config.target_depth if config.policy in ("static", "chain") else config.max_depth
    top_k = 1 if config.policy == "chain" else config.top_k
    most = [limit.max_nodes for limit in limits]
    step = Step(
        config=config,
        limits=limits,
        offer=offer,
        load=load,
        requests=[Candidates() for _ in limits],
        caps=most if config.transfer else even_caps(most, offer.num_nodes),
        max_depth=max_depth,
        widths=frontier_widths(max_depth, top_k, config.num_speculative_tokens),
        budget=offer.num_nodes,
    )
    for r, limit in enumerate(limits):
        if limit.max_nodes > 0:
            _expand(children, r, limit, step.requests[r], [ROOT], top_k)
    active = [r for r, cap in enumerate(step.caps) if cap > 0]
    for depth in range(max_depth):
        active = _go_deeper(step, active, depth)
        active = [r for r in active if depth + 1 < _deepest(step, r)]
        if depth + 1 == max_depth or step.budget == 0:
            break
        for r in active:
            request = step.requests[r]
            best = best_first(request.nodes, request.layer)[: step.widths[depth]]
            _expand(children, r, limits[r], request, best, top_k)
    return step


def _deepest(step: Step, r: int) -> int:
    """The deepest layer that can be drafted and used: a node at depth d needs d nodes. Gates know
    nothing of the cost of a forward, so the offer sets their end."""
    limit = step.limits[r]
    most = min(limit.max_depth, step.caps[r] if limit.can_expand else 1)
    return min(most, step.offer.depth) if step.config.policy in GATED else most


def _go_deeper(step: Step, active: list[int], depth: int) -> list[int]:
    if step.config.policy in GATED:
        return _buy_a_layer(step, _pass_the_gate(step, active, depth))
    if step.config.policy == "ddd":
        return _keep_the_beam(step, active, depth)
    if step.config.policy == "goodput":
        return _expect_a_gain(step, active, depth)
    return active


def _pass_the_gate(step: Step, active: list[int], depth: int) -> list[int]:
    threshold = thresholds(step.config).get(depth)
    if threshold is None:
        return active
    for r in active:
        step.requests[r].truncated = not step.requests[r].confidence > to_float32(threshold)
    return [r for r in active if not step.requests[r].truncated]


def _buy_a_layer(step: Step, active: list[int]) -> list[int]:
    requests = step.requests
    wants = [requests[r].num_layers < step.caps[r] for r in active]
    granted = grant_layer([requests[r].confidence for r in active], wants, step.budget)
    deeper = [r for r, yes in zip(active, granted, strict=True) if yes]
    for r in deeper:
        requests[r].num_layers += 1
    step.budget -= len(deeper)
    return deeper


def _keep_the_beam(step: Step, active: list[int], depth: int) -> list[int]:
    """Dynamic depth: the nodes that would be expanded hold more than ``threshold``."""
    if depth + 1 < step.config.target_depth or depth + 1 == step.max_depth:
        return active

    def mass(request: Candidates) -> float:
        total = 0.0
        for index in best_first(request.nodes, request.layer)[: step.widths[depth]]:
            total = to_float32(total + probability(request.nodes[index].score))
        return total

    return [r for r in active if mass(step.requests[r]) > to_float32(step.config.threshold)]


def _expect_a_gain(step: Step, active: list[int], depth: int) -> list[int]:
    """Those whose likeliest grandchild is worth its draft forward, if together they are worth the
    fixed cost of one."""
    if depth + 1 == step.max_depth:
        return active
    curve, calibration = step.config.profile, step.config.calibration or uncalibrated()
    assert curve is not None

    def gain(r: int) -> float:
        model = calibration.sampled if step.limits[r].sampled else calibration.greedy
        chance = step.requests[r].confidence * model.best_child_at(depth + 2)
        saved = (chance - step.offer.price) * step.offer.ms_per_token
        return saved - curve.layer.each * step.widths[depth]

    able = [r for r in active if depth + 1 < _deepest(step, r)]
    worth = [r for r in able if gain(r) > 0]
    return worth if sum(map(gain, worth)) > curve.layer.fixed else []


def thresholds(config: EchoConfig) -> dict[int, float]:
    """Threshold by depth of the gates that the policy asks."""
    given = {gate.depth: gate.threshold for gate in config.gates}
    if config.policy == "fixed-threshold":
        return {depth: config.threshold for depth in given}
    if config.policy == "dense" and given:
        return {depth: _interpolated(given, depth) for depth in range(config.max_depth)}
    return given


def _interpolated(given: dict[int, float], depth: int) -> float:
    below = [d for d in given if d <= depth]
    above = [d for d in given if d >= depth]
    if not below:
        return given[min(above)]
    if not above:
        return given[max(below)]
    low, high = max(below), min(above)
    if low == high:
        return given[low]
    share = (depth - low) / (high - low)
    return (1 - share) * given[low] + share * given[high]


def _expand(
    children: Children,
    r: int,
    limit: Limits,
    request: Candidates,
    parents: Sequence[int],
    top_k: int,
) -> None:
    """Append the children of ``parents`` to the request's nodes, as its deepest layer."""
    nodes = request.nodes
    request.layer = []
    for parent in parents:
        depth, score = (0, 0.0) if parent == ROOT else (nodes[parent].depth, nodes[parent].score)
        allowed = children(r, path_to(nodes, parent))[: 1 if limit.chain_only else top_k]
        for token, child_score in allowed:
            if child_score != -math.inf:
                request.layer.append(len(nodes))
                nodes.append(Node(token, parent, depth + 1, to_float32(score + child_score)))


def frontier_widths(max_depth: int, top_k: int, max_nodes: int) -> list[int]:
    """Nodes of depth 1, 2, ... to expand: one each, then up to top_k from the shallowest on."""
    widths = [1] * (max_depth - 1)
    for layer in range(len(widths)):
        while widths[layer] < top_k and sum(widths) < max_nodes - 1:
            widths[layer] += 1
    return widths


def path_to(nodes: Sequence[Node], index: int) -> tuple[int, ...]:
    """The tokens from the root to ``nodes[index]``; empty for ``ROOT``."""
    if index == ROOT:
        return ()
    return (*path_to(nodes, nodes[index].parent), nodes[index].token)
