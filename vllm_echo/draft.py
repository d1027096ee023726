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

from vllm_echo.gate import layer_confidence
from vllm_echo.policies import Policy
from vllm_echo.schedule import grant_layer
from vllm_echo.tree import BITS_PER_WORD, ROOT, CandidateTrees, num_words


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
    """The candidates of one depth, columns of the table to be: [R, M]."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    first_column: int


def grow_trees(
    head: DraftHead, batch: DraftBatch, policy: Policy, budget: int
) -> tuple[CandidateTrees, int]:
    """Draft for all requests; returns the candidates and the budget that phase 1 left.

    ``budget`` is K_max, nodes of the whole step. Fixed-shape policies spend nothing here.
    """
    layer = _first_layer(head, batch, policy)
    layers = [layer]
    num_layers = torch.zeros_like(batch.max_nodes)
    truncated = torch.zeros_like(batch.chain_only)
    active = batch.max_nodes > 0
    frontier: Frontier | None = None
    for depth in range(policy.max_depth):
        confidence = layer_confidence(layer.scores)
        active = active & (layer.scores > -torch.inf).any(dim=1)
        passed = active & policy.gates.passes(depth, confidence)
        truncated |= active & ~passed
        active = passed
        if policy.elastic:
            active = grant_layer(confidence, passed & (num_layers < batch.max_nodes), budget)
            num_layers += active.to(num_layers.dtype)
            budget -= int(active.sum())
        active = active & batch.can_expand & (depth + 1 < batch.max_nodes)
        exhausted = policy.elastic and budget <= 0
        if depth + 1 == policy.max_depth or exhausted or not bool(active.any()):
            break
        frontier = _next_frontier(layer, frontier, active, policy, depth + 1)
        layer = _next_layer(head, frontier, layer, batch, policy)
        layers.append(layer)
    return _candidates(layers, num_layers, truncated), budget


def _first_layer(head: DraftHead, batch: DraftBatch, policy: Policy) -> _Layer:
    tokens, scores = head.expand_roots(policy.top_k)
    scores = _usable_children(scores, batch.chain_only)
    scores = torch.where((batch.max_nodes > 0)[:, None], scores, -torch.inf)
    return _Layer(
        tokens.to(torch.int32), torch.full_like(tokens, ROOT, dtype=torch.int32), scores, 0
    )


def _usable_children(log_probs: torch.Tensor, chain_only: torch.Tensor) -> torch.Tensor:
    """-inf for children (last dimension) that may not be drafted: all but the likeliest where
    ``chain_only`` [A], and those whose probability is no number."""
    forbidden = chain_only.view(-1, *[1] * (log_probs.dim() - 1)).expand(log_probs.shape).clone()
    forbidden[..., 0] = False
    return log_probs.masked_fill(forbidden | log_probs.isnan(), -torch.inf)


def _next_frontier(
    layer: _Layer, previous: Frontier | None, active: torch.Tensor, policy: Policy, depth: int
) -> Frontier:
    """The best nodes of ``layer`` of the active requests, as many as the policy expands."""
    requests = active.nonzero().flatten()
    best = layer.scores[requests].argsort(dim=1, descending=True, stable=True)
    columns = best[:, : policy.frontier_widths[depth - 1]]
    width = columns.shape[1]
    slots = policy.first_slot(depth) + torch.arange(width, device=columns.device)
    words = num_words(policy.num_draft_slots)
    if previous is None:
        parent_rows = requests[:, None].expand(-1, width)
        ancestors = torch.zeros(
            requests.shape[0], width, words, dtype=torch.int64, device=columns.device
        )
    else:
        parent_node = torch.div(columns, policy.top_k, rounding_mode="floor")
        row_of_request = torch.searchsorted(previous.requests, requests)
        parent_rows = row_of_request[:, None] * previous.tokens.shape[1] + parent_node
        ancestors = previous.ancestors.flatten(0, 1)[parent_rows]
    own_bit = torch.ones_like(slots) << (slots % BITS_PER_WORD)
    ancestors[:, torch.arange(width, device=slots.device), slots // BITS_PER_WORD] |= own_bit
    return Frontier(
        requests=requests,
        tokens=layer.tokens[requests].gather(1, columns),
        parent_rows=parent_rows,
        depth=depth,
        first_slot=policy.first_slot(depth),
        ancestors=ancestors,
        columns=columns,
    )


def _next_layer(
    head: DraftHead, frontier: Frontier, layer: _Layer, batch: DraftBatch, policy: Policy
) -> _Layer:
    """Children of the frontier; requests outside it get -inf in every column."""
    tokens, log_probs = head.expand(frontier, policy.top_k)
    log_probs = _usable_children(log_probs, batch.chain_only[frontier.requests])
    node_scores = layer.scores[frontier.requests].gather(1, frontier.columns)
    shape = (layer.scores.shape[0], frontier.tokens.shape[1] * policy.top_k)
    grown = _Layer(
        tokens=torch.zeros(shape, dtype=torch.int32, device=tokens.device),
        parents=torch.full(shape, ROOT, dtype=torch.int32, device=tokens.device),
        scores=torch.full(shape, -torch.inf, device=tokens.device),
        first_column=layer.first_column + layer.scores.shape[1],
    )
    parents = (layer.first_column + frontier.columns)[:, :, None].expand(tokens.shape)
    grown.tokens[frontier.requests] = tokens.flatten(1).to(torch.int32)
    grown.parents[frontier.requests] = parents.flatten(1).to(torch.int32)
    grown.scores[frontier.requests] = (node_scores[:, :, None] + log_probs).flatten(1)
    return grown


def _candidates(
    layers: list[_Layer], num_layers: torch.Tensor, truncated: torch.Tensor
) -> CandidateTrees:
    scores = torch.cat([layer.scores for layer in layers], dim=1)
    depths = [torch.full_like(layer.tokens, depth) for depth, layer in enumerate(layers, start=1)]
    return CandidateTrees(
        tokens=torch.cat([layer.tokens for layer in layers], dim=1),
        parents=torch.cat([layer.parents for layer in layers], dim=1),
        depths=torch.cat(depths, dim=1),
        scores=scores,
        num_layers=num_layers,
        truncated=truncated,
    )
