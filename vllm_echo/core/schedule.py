# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*: spend K_max over all requests, node by node. (arXiv:2604.09603, elastic
budget scheduler.)

Two functions. ``order_trees`` puts all candidates into one order of admission, which does not
depend on K_max; ``admit_nodes`` takes the first K_max of it. The first is work of each request
alone and can be done as soon as candidates are there, the second is one search over all keys and
can wait until K_max is known.

Under ``Rule.GATES`` the order is

1. *depth*: layer by layer, the most confident requests first, one node a layer, as far as a
   request's own gates let it go;
2. *width*: the other candidates by path score, those of truncated requests before all others.

So width comes only when nobody can go deeper, as the paper has it. A grant is a number, not a node:
a request's i-th place in the order says when it may have i nodes, and it spends them on its i best
by path score, which are always closed under parents. The published pseudo-code can overshoot (it
subtracts whole layers, and uses an unclipped width); admission node by node cannot.
"""

from functools import lru_cache

import torch

from vllm_echo import ops
from vllm_echo.core.decision import Decision
from vllm_echo.core.gate import Limits
from vllm_echo.core.tree import CandidateTrees, DraftTrees, OrderedTrees


def cap_nodes(max_nodes: torch.Tensor, decision: Decision) -> torch.Tensor:
    """[R] int32, most nodes of each request, within the engine's ``max_nodes`` [R].

    Without transfer an even share of the budget for all that are drafted for, odd nodes to the
    first ones. Only there does the order of admission depend on K_max: it has to be known before.
    """
    if decision.transfer:
        return max_nodes
    drafted = max_nodes > 0
    place = drafted.cumsum(0) - 1
    num_drafted = drafted.sum().clamp(min=1)
    share = torch.div(decision.budget, num_drafted, rounding_mode="floor")
    even = share + (place < decision.budget - share * num_drafted)
    return torch.minimum(max_nodes.long(), even).to(max_nodes.dtype)


def order_trees(
    candidates: CandidateTrees, limits: Limits, decision: Decision, max_nodes: int
) -> OrderedTrees:
    """Each request's ``max_nodes`` best candidates, and when they come to be admitted.

    ``candidates`` of all layers, or of those only that a draft loop went on to: the nodes that a
    budget then admits are the same (``gate.layers_reached`` for rules without gates).
    """
    ordered = ops.order_trees(
        candidates.tokens,
        candidates.parents,
        candidates.depths,
        candidates.scores,
        limits.caps,
        limits.deepest,
        _threshold_tensor(decision.thresholds, candidates.scores.device),
        decision.rule,
        decision.width,
        max_nodes,
    )
    return OrderedTrees(*ordered)


@lru_cache(maxsize=64)
def _threshold_tensor(thresholds: tuple[float | None, ...], device: torch.device) -> torch.Tensor:
    """[D] float32, NaN where there is no gate."""
    return torch.tensor([torch.nan if t is None else t for t in thresholds], device=device)


def step_size(trees: OrderedTrees, decision: Decision) -> int:
    """How many nodes are verified, at most: K_max, or under ``Rule.PRICE`` as many of it as make
    the step's time per output token least.

    Sorted probabilities make every number of leading nodes the best set of its size, so one pass
    over the numbers finds the best set. Goodput as in expected tokens per time; the paper has no
    such rule.
    """
    prices = decision.prices
    if prices is None:
        return decision.budget
    return ops.fastest_size(trees.keys, prices.added_ms, prices.num_requests, prices.plain_ms)


def admit_nodes(trees: OrderedTrees, budget: int) -> DraftTrees:
    """The first ``budget`` nodes of the order; all of them if there are no more."""
    counts = ops.admit_nodes(trees.keys, budget)
    return DraftTrees(trees.tokens, trees.parents, trees.depths, counts)


def schedule(
    candidates: CandidateTrees, limits: Limits, decision: Decision, max_nodes: int
) -> DraftTrees:
    """Order and admission at once: the next step's trees, ``max_nodes`` columns wide."""
    trees = order_trees(candidates, limits, decision, max_nodes)
    return admit_nodes(trees, step_size(trees, decision))
