# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*: spend K_max over all requests, node by node. (arXiv:2604.09603, elastic
budget scheduler.)

Phase 1, *depth*: layer by layer while drafting goes on (``ops.grant_layer``), the most confident
requests first, ties by request order, one node a layer.
Phase 2, *width*: only when nobody can go deeper (``ops.grant_width``), what is left goes to
the best unspent candidates, those of truncated requests first.

A grant is a number, not a node: a request spends its number on its best candidates by path
score, which are always closed under parents. The published pseudo-code can overshoot
(it subtracts whole layers, and uses an unclipped width); admission node by node cannot.
"""

import torch

from vllm_echo import ops
from vllm_echo.core.tree import CandidateTrees, DraftTrees


def best_paying(
    trees: CandidateTrees,
    caps: torch.Tensor,
    num_requests: int,
    plain_ms: float,
    added_ms: torch.Tensor,
) -> torch.Tensor:
    """[R] int32: the nodes that make the step's time per output token least.

    ``trees`` ranked, with log acceptance probabilities for scores; ``caps`` [R] int32;
    ``num_requests`` tokens come in any case, in ``plain_ms``; ``added_ms`` [K + 1] float64 is
    what 0 to K nodes add, K the most that may be taken. The best nodes of all requests come
    first, ties by request order: sorted probabilities make every count the best set of its
    size, so one pass over the counts finds the best set. Goodput as in expected tokens per
    time; the paper has no such rule.
    """
    return ops.best_paying(trees.scores, caps, added_ms, num_requests, plain_ms)


def share_evenly(wanted: torch.Tensor, budget: int) -> torch.Tensor:
    """[R] int32: the budget of the fixed-shape policies, in rounds of one node each.

    ``wanted`` [R] int32 nodes each request would take. Whole rounds first; the last,
    incomplete one goes by request order.
    """
    counts = torch.zeros_like(wanted)
    while budget > 0:
        open_requests = (counts < wanted).nonzero().flatten()
        if open_requests.numel() == 0:
            break
        step = max(1, budget // open_requests.numel())
        served = open_requests[:budget]
        given = torch.minimum(
            wanted[served] - counts[served], torch.full_like(served, step, dtype=wanted.dtype)
        )
        counts[served] += given
        budget -= int(given.sum())
    return counts


def rank_candidates(trees: CandidateTrees, max_nodes: int) -> CandidateTrees:
    """Each request's ``max_nodes`` best candidates, in descending path score, ties by index.

    A parent never scores below its child and comes before it, so parents stay among the kept,
    and every prefix of a row is a tree. Only finite scores count as candidates.
    """
    ranked = ops.rank_trees(trees.tokens, trees.parents, trees.depths, trees.scores, max_nodes)
    return CandidateTrees(*ranked, trees.num_layers, trees.truncated)


def take_leading(trees: CandidateTrees, counts: torch.Tensor, max_nodes: int) -> DraftTrees:
    """The first ``counts`` [R] candidates of ``trees`` (ranked); ``max_nodes`` is the width of
    the result. Counts beyond the finite scores are the caller's error."""
    return DraftTrees(
        tokens=_padded(trees.tokens, max_nodes),
        parents=_padded(trees.parents, max_nodes),
        depths=_padded(trees.depths, max_nodes),
        num_nodes=counts.to(torch.int32),
    )


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
