# SPDX-License-Identifier: Apache-2.0
"""Stage *pack*: flatten all trees of a step into the rows of one target forward.

The paper gives no layout. Ours: request-major, the root first, nodes in the tree's own
order; ancestors as bits, so that a row's mask is one or a few words and its length is
independent of the context's.
"""

from functools import lru_cache

import torch

from vllm_echo import ops
from vllm_echo.core.tree import DraftTrees, SuperTree


def pack_trees(trees: DraftTrees) -> SuperTree:
    """R trees of N nodes at most -> the packed super-tree (``SuperTree``, T = R + nodes)."""
    num_nodes = trees.num_nodes.contiguous()
    return SuperTree(*ops.pack_trees(trees.tokens, trees.parents, trees.depths, num_nodes))


@lru_cache(maxsize=512)
def pack_roots(num_requests: int, device: torch.device) -> SuperTree:
    """The super-tree of a step without candidates: R roots. Nobody may write to it."""
    zeros = torch.zeros(num_requests, dtype=torch.int32, device=device)
    return SuperTree(
        cu_rows=torch.arange(num_requests + 1, dtype=torch.int32, device=device),
        tokens=zeros - 1,
        parents=zeros - 1,
        depths=zeros,
        ancestors=torch.ones(num_requests, 1, dtype=torch.int64, device=device),
    )
