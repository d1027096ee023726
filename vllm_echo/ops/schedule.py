# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*: in which order nodes are admitted, and how many."""

import torch

from vllm_echo.ops.library import call


def order_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    thresholds: torch.Tensor,
    rule: int,
    width: bool,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request's best candidates, and when its nodes come to be admitted.

    The order does not depend on the budget: whatever that is, its nodes are the first of one order
    over all requests (``admit_nodes``). A request's i-th key says when it may have i + 1 nodes, and
    those are its i + 1 best, so keys ascend within a request. No request looks at another.

    By ``rule``:

    - 0, gates: first the layers that a request's gates let it pay for, one node each: by depth,
      then by confidence exp(best score of the layer), falling, in float32. A gate lets pass what
      is above its threshold, and else truncates the request; candidates below the layer that it
      judged, or below ``deepest``, count for nothing. Then, if ``width``, the other nodes by score,
      falling, those of truncated requests before all others.
    - 1, price: by exp(score), falling, in float32; nodes worth 0 or NaN are none.
    - 2, shares: by rank, in turns of one node a request.

    Ties go by request and then by rank.

    Args:
        tokens, parents, depths: [R, C] int32, as ``CandidateTrees`` has them; a parent is -1 (the
            root) or any candidate of its request. The last dimension is contiguous.
        scores: [R, C] float32, those of layers that were not drafted -inf; NaN counts as -inf.
        caps, deepest: [R] int32, most nodes and last layer of each request; with a cap of 0 it
            has none.
        thresholds: [D] float32, the gate at depth 0 to D - 1; NaN is none. At most D layers are
            paid for. Of no meaning under other rules.
        max_nodes: N, 0 to 255; R * N is at most 2**22.

    Returns:
        tokens, parents, depths [R, N] int32: in descending score, ties by index; a parent is its
        place in this order, which is N or more when it is not among the kept. What is no candidate
        comes last.
        keys [R, N] int64: 0 to 2**63 - 2, no two alike; 2**63 - 1 where there is no such node.

    ValueError: a kept candidate whose parent is no candidate.
    """
    limits = (caps, deepest, thresholds, rule, width, max_nodes)
    return call("order_trees", tokens, parents, depths, scores, *limits)


def admit_nodes(keys: torch.Tensor, budget: int) -> torch.Tensor:
    """Spend a budget: the nodes with the ``budget`` lowest keys of all requests.

    So min(budget, nodes there are) are admitted, and one more of budget is one node more for one
    request.

    Args:
        keys: [R, N] int64, as ``order_trees`` makes them.
        budget: nodes of all requests; less than 1 admits none.

    Returns:
        num_nodes [R] int32.
    """
    return call("admit_nodes", keys, budget)


def fastest_size(
    keys: torch.Tensor, added_ms: torch.Tensor, num_requests: int, plain_ms: float
) -> int:
    """The budget that makes the step's output tokens come fastest.

    The n nodes with the lowest keys take ``plain_ms + added_ms[n]`` for ``num_requests`` tokens and
    the sum of their probabilities. Of equally fast n the smallest is chosen.

    Args:
        keys: [R, N] int64, as ``order_trees`` makes them under rule 1.
        added_ms: [K + 1] float64, what 0 to K nodes add; K is the most that may be taken.
        num_requests: at least 0; tokens that come in any case.
        plain_ms: positive, unless K is 0.
    """
    return int(call("fastest_size", keys, added_ms, num_requests, plain_ms))


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
    """``order_trees`` under rule 0 and ``admit_nodes`` at once, on a CUDA device only.

    What is not paid for is not looked at: here a gate counts, and truncates, those only that the
    budget let come to it, as in a draft loop that asks ``grant_layer`` after every layer.

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
        tokens, parents, depths [R, W] int32 as from ``order_trees``, W = min(max_nodes, C), and
        their scores [R, W] float32; num_nodes, num_layers [R] int32; truncated [R] bool;
        gate_counts [D, 3] int64: passed, cut, granted.
    """
    candidates = (tokens, parents, depths, scores)
    limits = (caps, deepest, thresholds, budget, width, max_nodes)
    return call("schedule_budget", *candidates, *limits)
