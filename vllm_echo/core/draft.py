# SPDX-License-Identifier: Apache-2.0
"""Stage *draft*: grow candidate trees layer by layer, deterministic top-k, best first.

The loop is the same for every policy; gates and grants decide between two layers who goes
on, so a request that was truncated, or got no budget, takes part in no further draft
forward. Nothing is sampled: candidates are the draft model's top-k by probability, which
is what makes pruning by their own probability lossless (docs/algorithm.md).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_echo import ops
from vllm_echo.core.decision import Decision, Rule
from vllm_echo.core.gate import Growth, Limits, go_deeper
from vllm_echo.core.schedule import cap_nodes
from vllm_echo.core.score import child_scores
from vllm_echo.core.shape import TreeShape
from vllm_echo.core.tree import ROOT, CandidateTrees


@dataclass
class Frontier:
    """Nodes of one depth that the draft model expands together: A requests, F nodes each."""

    requests: torch.Tensor
    """[A] int64, index into the drafting batch, ascending."""
    tokens: torch.Tensor
    """[A, F] int32."""
    parent_rows: torch.Tensor
    """[A, F] int64, row of the parent in the previous forward, flattened: its request at
    depth 1, ``a * F + f`` of the previous frontier below."""
    depth: int
    """Depth of these nodes; their draft position is the root's plus this."""
    first_slot: int
    """Draft KV of node f goes to the root's slot + 1 + first_slot + f."""
    ancestors: torch.Tensor
    """[A, F, W] int64, bit s: the node attends to draft slot s (itself included)."""
    columns: torch.Tensor
    """[A, F] int64, the nodes' columns in their layer of candidates."""


@dataclass
class DraftBatch:
    """What the engine allows each of R requests; filled by the adapter."""

    max_nodes: torch.Tensor
    """[R] int32, most nodes in the next step (0: do not draft)."""
    can_expand: torch.Tensor
    """[R] bool, its draft slots exist, so nodes below depth 1 can be drafted."""
    chain_only: torch.Tensor
    """[R] bool, only one child a node (structured output: masks are per position)."""
    max_depths: torch.Tensor
    """[R] int32, deepest layer that can still be used (a request near its max_tokens)."""
    sampled: torch.Tensor
    """[R] bool, temperature above 0."""


class DraftHead(Protocol):
    """The draft model as this stage sees it. Log-probabilities are over its vocabulary,
    tokens in the target's; one node's children are distinct and come likeliest first."""

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Top ``width`` children of every root: tokens, log-probabilities, [R, width]."""
        ...

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Top ``width`` children of every frontier node: [A, F, width] each."""
        ...


@dataclass
class _Layer:
    """The candidates of one depth: views of the table's columns, [R, M]."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    first_column: int


def limit_requests(batch: DraftBatch, decision: Decision) -> Limits:
    """How far each request may go. A node at depth d needs d nodes."""
    caps = cap_nodes(batch.max_nodes, decision)
    most_layers = torch.where(batch.can_expand, caps, 1)
    deepest = torch.minimum(batch.max_depths.clamp(max=decision.max_depth), most_layers)
    return Limits(caps, deepest, batch.sampled)


def grow_trees(
    head: DraftHead, batch: DraftBatch, decision: Decision
) -> tuple[CandidateTrees, Growth]:
    """Draft for all requests; returns the candidates, and what was found out on the way."""
    shape = decision.shape
    growth = Growth.begin(limit_requests(batch, decision), decision)
    table = _empty_table(batch.max_nodes.shape[0], shape, batch.max_nodes.device)
    requests = growth.active.nonzero().flatten()
    tokens, log_probs = (children[:, None] for children in head.expand_roots(shape.top_k))
    if requests.shape[0] < tokens.shape[0]:
        tokens, log_probs = tokens[requests], log_probs[requests]
    layer, frontier = _layer(table, shape, 1), None
    above: tuple[torch.Tensor | None, torch.Tensor | None, int] = (None, None, 0)
    for depth in range(decision.max_depth):
        tokens, log_probs = tokens.contiguous(), log_probs.contiguous()
        scores = child_scores(decision, depth + 1, log_probs, requests, batch.sampled)
        best = ops.append_layer(
            layer.tokens,
            layer.parents,
            layer.scores,
            requests,
            tokens,
            scores,
            batch.chain_only,
            *above,
        )
        growth.active = go_deeper(decision, growth, depth, layer.scores, best)
        if depth + 1 == decision.max_depth or _nothing_left(decision, growth):
            break
        frontier, parent_scores = _next_frontier(layer, frontier, growth.active, shape, depth + 1)
        requests = frontier.requests
        if requests.shape[0] == 0:
            break
        tokens, log_probs = head.expand(frontier, shape.top_k)
        above = (parent_scores, frontier.columns, layer.first_column)
        layer = _layer(table, shape, depth + 2)
        growth.num_forwards += 1
        growth.num_expanded += frontier.tokens.numel()
    drafted = layer.first_column + layer.scores.shape[1]
    return table.leading(drafted), growth


def _nothing_left(decision: Decision, growth: Growth) -> bool:
    """Phase 1 has spent the budget: a layer more could have no node."""
    return decision.rule is Rule.GATES and growth.budget <= 0


def _empty_table(num_requests: int, shape: TreeShape, device: torch.device) -> CandidateTrees:
    size = (num_requests, shape.num_candidates)
    return CandidateTrees(
        tokens=torch.zeros(size, dtype=torch.int32, device=device),
        parents=torch.full(size, ROOT, dtype=torch.int32, device=device),
        depths=shape.column_depths.to(device).expand(size),
        scores=torch.full(size, -torch.inf, device=device),
    )


def _layer(table: CandidateTrees, shape: TreeShape, depth: int) -> _Layer:
    first, last = shape.layer_columns(depth)
    return _Layer(
        table.tokens[:, first:last],
        table.parents[:, first:last],
        table.scores[:, first:last],
        first,
    )


def _next_frontier(
    layer: _Layer,
    previous: Frontier | None,
    active: torch.Tensor,
    shape: TreeShape,
    depth: int,
) -> tuple[Frontier, torch.Tensor]:
    """The best nodes of ``layer`` of the ``active`` requests [R], as many as the policy expands,
    and their scores [A, F]."""
    above = (None, None) if previous is None else (previous.requests, previous.ancestors)
    own_bits = shape.own_bits(depth).to(active.device)
    requests, tokens, parent_rows, ancestors, columns, scores = ops.next_frontier(
        layer.tokens, layer.scores, active, own_bits, shape.top_k, *above
    )
    frontier = Frontier(
        requests=requests,
        tokens=tokens,
        parent_rows=parent_rows,
        depth=depth,
        first_slot=shape.first_slot(depth),
        ancestors=ancestors,
        columns=columns,
    )
    return frontier, scores
