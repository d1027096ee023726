# SPDX-License-Identifier: Apache-2.0
"""Stages *draft* and *gate*: a layer of candidates after the other."""

import torch

from vllm_echo.ops.library import call


def score_children(
    log_probs: torch.Tensor,
    requests: torch.Tensor,
    sampled: torch.Tensor,
    curves: torch.Tensor,
) -> torch.Tensor:
    """Draft log-probabilities as log acceptance probabilities, each by its request's curve.

    log sigmoid(intercept + slope * logit(q)) of log q, in float32, within 1e-6 of the value in
    float64 as far as that is above -1, and within 1e-6 of its size below. q = 1 counts as
    exp(-1e-6); -inf (no child) and NaN stay what they are. A score depends on its own value and
    curve only, not on its place.

    Args:
        log_probs: [A, F, K] float32, contiguous.
        requests: [A] int64 rows of ``sampled``, ascending.
        sampled: [R] bool, which of the two curves a request has.
        curves: [2, 2] float32, (intercept, slope) where ``sampled`` is False, then where True.

    Returns:
        scores [A, F, K] float32.
    """
    return call("score_children", log_probs, requests, sampled, curves)


def append_layer(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    scores: torch.Tensor,
    requests: torch.Tensor,
    child_tokens: torch.Tensor,
    child_scores: torch.Tensor,
    chain_only: torch.Tensor,
    parent_scores: torch.Tensor | None = None,
    parent_columns: torch.Tensor | None = None,
    first_parent_column: int = 0,
) -> torch.Tensor:
    """Write the drafted children of A requests into their rows of a layer of candidates.

    A path's score is its parent's plus the child's, in float32. Children that may not be drafted
    get -inf: where that sum is NaN, and all but the first of a parent where ``chain_only``.

    Args:
        tokens, parents: [R, M] int32, the layer's columns of the table, written to; M = F * K.
            The last dimension is contiguous.
        scores: [R, M] float32, likewise.
        requests: [A] int64, ascending: the rows that are written.
        child_tokens: [A, F, K] int32, K children of each of F parents, contiguous.
        child_scores: [A, F, K] float32, contiguous.
        chain_only: [R] bool.
        parent_scores: [A, F] float32. None: the root is the only parent, with score 0.
        parent_columns: [A, F] int64, places of the parents in the layer above.
        first_parent_column: column of the table where that layer begins.

    Returns:
        best [R] float32, the highest score of each request's layer; -inf where there is none.
    """
    children = (child_tokens, child_scores, chain_only)
    above = (parent_scores, parent_columns, first_parent_column)
    return call("append_layer", tokens, parents, scores, requests, *children, *above)


def grant_layer(
    best: torch.Tensor,
    active: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    num_layers: torch.Tensor,
    truncated: torch.Tensor,
    depth: int,
    threshold: float | None,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of phase 1: the gate, then a node for those that want a layer more.

    Requests that are active, and whose ``best`` is above -inf, come to the gate; it lets pass those
    with exp(best) > threshold, in float32, and truncates the others. Of those that passed and have
    fewer layers than their cap, ``budget`` are granted one: the highest exp(best) first, ties by
    request, so that every rank decides alike.

    Args:
        best: [R] float32, the best path score of the layer drafted from ``depth``.
        active: [R] bool.
        caps, deepest: [R] int32, most nodes and last layer of each request.
        num_layers: [R] int32, increased by one where granted.
        truncated: [R] bool, set where the gate cuts.
        threshold: None where there is no gate.
        budget: nodes left; less than 1 grants none.

    Returns:
        deeper [R] bool: granted, and depth + 1 is not its last layer.
        counts [3] int64: passed, cut, granted.
    """
    state = (best, active, caps, deepest, num_layers, truncated)
    return call("grant_layer", *state, depth, threshold, budget)


def expect_gain(
    best: torch.Tensor,
    active: torch.Tensor,
    deepest: torch.Tensor,
    sampled: torch.Tensor,
    best_child: torch.Tensor,
    depth: int,
    price: float,
    ms_per_token: float,
    request_ms: float,
    layer_ms: float,
) -> torch.Tensor:
    """Who is worth a layer more, if together they are worth the forward that drafts it.

    A request's gain is (exp(best) * best_child - price) * ms_per_token - request_ms, in float64
    but for exp, and it is worth the layer if that is positive; nobody is if the sum of the positive
    gains is not above ``layer_ms``. Only active requests whose ``best`` is above -inf and whose
    last layer is below depth + 1 count.

    Args:
        best: [R] float32, log acceptance probability of the best path.
        active: [R] bool. deepest: [R] int32. sampled: [R] bool.
        best_child: [2] float64, acceptance probability of the likeliest child where ``sampled`` is
            False, then where True.

    Returns:
        deeper [R] bool.
    """
    state = (best, active, deepest, sampled, best_child)
    return call("expect_gain", *state, depth, price, ms_per_token, request_ms, layer_ms)


def next_frontier(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    own_bits: torch.Tensor,
    top_k: int,
    previous_requests: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The best F candidates of a layer, for each of the A active requests: the nodes to expand.

    In descending score, ties by column; NaN counts as -inf, and -inf is expanded, too.

    Args:
        tokens: [R, M] int32, the layer's candidates, those of one parent side by side. The last
            dimension is contiguous.
        scores: [R, M] float32.
        active: [R] bool.
        own_bits: [F, W] int64, the ancestor bit of each node's own draft slot; F <= M.
        top_k: children of each parent, below the first layer.
        previous_requests: [P] int64 ascending, the requests of the previous frontier; all
            active ones are among them. None at the first layer, where the root is the parent.
        ancestors: [P, F', W] int64, the ancestor bits of the previous frontier's nodes; the layer
            has at most F' * top_k candidates.

    Returns:
        requests [A] int64, ascending; tokens [A, F] int32; parent_rows [A, F] int64: the request
        at the first layer, row p * F' + f of the previous frontier below; ancestors [A, F, W]
        int64: the parent's and the own bit; columns [A, F] int64: places in the layer; scores
        [A, F] float32.
    """
    previous = (previous_requests, ancestors)
    return call("next_frontier", tokens, scores, active, own_bits, top_k, *previous)
