# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*: order and number of the nodes that are verified."""

import torch

from vllm_echo.ops.library import call


def rank_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best ``max_nodes`` candidates of each request, in descending score, ties by index.

    Args:
        tokens, parents, depths: [R, C] int32, as ``CandidateTrees`` has them; a parent is -1 (the
            root) or any candidate of its request. The last dimension is contiguous.
        scores: [R, C] float32; NaN counts as -inf.
        max_nodes: at least 0; may be more than there are candidates.

    Returns:
        tokens, parents, depths [R, W] int32, scores [R, W] float32, W = min(max_nodes, C); a
        parent is its place in this order, which is W or more when it is not among the kept.

    ValueError: a kept candidate whose parent is no candidate.
    """
    return call("rank_trees", tokens, parents, depths, scores, max_nodes)


def grant_width(
    scores: torch.Tensor,
    truncated: torch.Tensor,
    granted: torch.Tensor,
    caps: torch.Tensor,
    budget: int,
) -> torch.Tensor:
    """Phase 2: nodes per request once ``budget`` is spent on the best candidates left.

    Those of truncated requests come first, then all others; within a class by score, ties by
    request and then by rank.

    Args:
        scores: [R, C] float32, descending within a request. Candidates are those that are finite.
        truncated: [R] bool.
        granted: [R] int32, nodes that each request has already.
        caps: [R] int32, most nodes of each request; may be more than C.
        budget: nodes left; less than 1 adds none.

    Returns:
        counts [R] int32.
    """
    return call("grant_width", scores, truncated, granted, caps, budget)


def best_paying(
    scores: torch.Tensor,
    caps: torch.Tensor,
    added_ms: torch.Tensor,
    num_requests: int,
    plain_ms: float,
) -> torch.Tensor:
    """How many nodes of each request make the step's output tokens come fastest.

    Of all nodes the n with the highest exp(score), in float32, ties by request and then by rank,
    take ``plain_ms + added_ms[n]`` for ``num_requests`` tokens and the sum of theirs. Of equally
    fast n the smallest is chosen. Nodes whose exp is 0 or NaN are never taken.

    Args:
        scores: [R, C] float32 log acceptance probabilities, descending within a request.
        caps: [R] int32, most nodes of each request; may be more than C.
        added_ms: [K + 1] float64, what 0 to K nodes add; K is the most that may be taken.
        num_requests: at least 0; tokens that come in any case.
        plain_ms: positive, unless K is 0.

    Returns:
        num_nodes [R] int32.
    """
    return call("best_paying", scores, caps, added_ms, num_requests, plain_ms)


def schedule_budget(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    thresholds: torch.Tensor,
    budget: int,
    width: bool,
    max_nodes: int,
) -> tuple[torch.Tensor, ...]:
    """The elastic scheduler at once, over candidates of all layers: gates, depth, then width.

    The result is that of a draft loop which asks ``grant_layer`` after every layer and drafts no
    further for those that it stops, then ``rank_trees`` and ``grant_width``: candidates of layers
    that would not have been drafted do not count. For a device that drafts all layers before it
    decides.

    Args:
        tokens, parents, depths: [R, C] int32, as ``CandidateTrees`` has them, the last dimension
            contiguous.
        scores: [R, C] float32; NaN counts as -inf.
        caps, deepest: [R] int32, most nodes and last layer of each request.
        thresholds: [D] float32, the gate at depth 0 to D - 1; NaN is none. D layers are drafted.
        budget: nodes of all requests.
        width: False ends after phase 1.
        max_nodes: columns of the trees, no more than C are returned.

    Returns:
        tokens, parents, depths [R, W] int32, scores [R, W] float32, as from ``rank_trees``;
        num_nodes, num_layers [R] int32; truncated [R] bool; gate_counts [D, 3] int64: passed, cut,
        granted.
    """
    candidates = (tokens, parents, depths, scores)
    limits = (caps, deepest, thresholds, budget, width, max_nodes)
    return call("schedule_budget", *candidates, *limits)
