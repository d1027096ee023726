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


def pack_trees(
    trees: DraftTrees, max_rows: int | None = None, num_nodes: int | None = None
) -> SuperTree:
    """R trees of N nodes at most -> the packed super-tree (``SuperTree``).

    ``max_rows``: T, with padding behind the last tree; T = R + nodes without it, which a device
    would have to be asked for. ``num_nodes``: of all trees, where the caller knows it; padded
    ones are counted otherwise, which waits for a device, too.
    """
    counts = trees.num_nodes.contiguous()
    cu_rows, tokens, parents, depths, ancestors = ops.pack_trees(
        trees.tokens, trees.parents, trees.depths, counts, max_rows
    )
    if num_nodes is None:
        num_nodes = tokens.shape[0] - counts.shape[0] if max_rows is None else int(counts.sum())
    return SuperTree(cu_rows, tokens, parents, depths, ancestors, num_nodes)


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
        num_nodes=0,
    )
