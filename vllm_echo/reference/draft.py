# SPDX-License-Identifier: Apache-2.0
"""Stages *draft*, *gate* and *schedule*, the obvious version: a step's whole decision.

The draft model is a function from a request and a path of tokens to that path's children, best
first. Arithmetic is that of float32, one rounding per addition and one for exp.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_echo.config import EchoConfig
from vllm_echo.reference.schedule import (
    ROOT,
    Node,
    best_first,
    grant_layer,
    grant_width,
    share_evenly,
    take_best,
)

Children = Callable[[int, tuple[int, ...]], Sequence[tuple[int, float]]]
"""(request, path) -> (token, log-probability) of each child, best first."""


class Limits(NamedTuple):
    """What the engine allows a request."""

    max_nodes: int
    can_expand: bool = True
    chain_only: bool = False


@dataclass
class Candidates:
    """One request's drafted nodes and what became of it in phase 1."""

    nodes: list[Node] = field(default_factory=list)
    num_layers: int = 0
    truncated: bool = False


def propose_trees(
    children: Children, limits: Sequence[Limits], config: EchoConfig, budget: int
) -> list[list[Node]]:
    """The next step's tree of each request, at most ``budget`` nodes in all."""
    drafted, budget = grow_trees(children, limits, config, budget)
    if config.policy == "echo":
        counts = grant_width(
            [[node.score for node in request.nodes] for request in drafted],
            [request.truncated for request in drafted],
            [request.num_layers for request in drafted],
            [limit.max_nodes for limit in limits],
            budget,
        )
    else:
        wishes = zip(drafted, limits, strict=True)
        counts = share_evenly([min(len(r.nodes), limit.max_nodes) for r, limit in wishes], budget)
    return [take_best(r.nodes, count) for r, count in zip(drafted, counts, strict=True)]


def grow_trees(
    children: Children, limits: Sequence[Limits], config: EchoConfig, budget: int
) -> tuple[list[Candidates], int]:
    """Everything drafted, and the budget that phase 1 left."""
    elastic = config.policy == "echo"
    max_depth = config.max_depth if elastic else config.target_depth
    top_k = 1 if config.policy == "chain" else config.top_k
    widths = frontier_widths(max_depth, top_k, config.num_speculative_tokens)
    thresholds = {gate.depth: gate.threshold for gate in config.gates} if elastic else {}

    requests = [Candidates() for _ in limits]
    active = [r for r, limit in enumerate(limits) if limit.max_nodes > 0]
    layers = {r: _expand(children, r, limits[r], requests[r].nodes, [ROOT], top_k) for r in active}
    for depth in range(max_depth):
        confidence = {r: _confidence(requests[r].nodes, layers[r]) for r in active}
        if depth in thresholds:
            for r in active:
                requests[r].truncated = not confidence[r] > to_float32(thresholds[depth])
            active = [r for r in active if not requests[r].truncated]
        if elastic:
            wants = [requests[r].num_layers < limits[r].max_nodes for r in active]
            granted = grant_layer([confidence[r] for r in active], wants, budget)
            active = [r for r, yes in zip(active, granted, strict=True) if yes]
            budget -= len(active)
            for r in active:
                requests[r].num_layers += 1
        active = [r for r in active if limits[r].can_expand]
        if depth + 1 == max_depth or (elastic and budget == 0):
            break
        for r in active:
            nodes = requests[r].nodes
            best = best_first(nodes, layers[r])[: widths[depth]]
            layers[r] = _expand(children, r, limits[r], nodes, best, top_k)
    return requests, budget


def _expand(
    children: Children,
    request: int,
    limit: Limits,
    nodes: list[Node],
    parents: Sequence[int],
    top_k: int,
) -> list[int]:
    """Append the children of ``parents`` to ``nodes``; returns their indices."""
    first = len(nodes)
    for parent in parents:
        depth, score = (0, 0.0) if parent == ROOT else (nodes[parent].depth, nodes[parent].score)
        allowed = children(request, path_to(nodes, parent))[: 1 if limit.chain_only else top_k]
        for token, log_prob in allowed:
            if log_prob != -math.inf:
                nodes.append(Node(token, parent, depth + 1, to_float32(score + log_prob)))
    return list(range(first, len(nodes)))


def _confidence(nodes: Sequence[Node], layer: Sequence[int]) -> float:
    return to_float32(math.exp(max(nodes[index].score for index in layer)))


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


def to_float32(value: float) -> float:
    """Round to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
