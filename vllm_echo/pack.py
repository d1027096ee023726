# SPDX-License-Identifier: Apache-2.0
"""Stage *pack*: flatten all trees of a step into the rows of one target forward.

The paper gives no layout. Ours: request-major, the root first, nodes in the tree's own
order; ancestors as bits, so that a row's mask is one or a few words and its length is
independent of the context's.
"""

import torch

from vllm_echo.tree import BITS_PER_WORD, ROOT, DraftTrees, SuperTree, num_words


def pack_trees(trees: DraftTrees) -> SuperTree:
    """R trees of N nodes at most -> the packed super-tree (``SuperTree``, T = R + nodes)."""
    device = trees.tokens.device
    rows_per_request = trees.num_nodes.long() + 1
    num_requests = rows_per_request.shape[0]
    cu_rows = torch.zeros(num_requests + 1, dtype=torch.int32, device=device)
    cu_rows[1:] = rows_per_request.cumsum(0)
    owner = torch.repeat_interleave(torch.arange(num_requests, device=device), rows_per_request)
    local = torch.arange(owner.shape[0], device=device) - cu_rows[owner].long()
    is_root = local == 0
    used = torch.arange(trees.tokens.shape[1], device=device) < trees.num_nodes[:, None]
    tokens = _rows(is_root, trees.tokens[used], -1)
    parents = _rows(is_root, trees.parents[used] - ROOT, -1)
    depths = _rows(is_root, trees.depths[used], 0)
    return SuperTree(
        cu_rows=cu_rows,
        tokens=tokens,
        parents=parents,
        depths=depths,
        ancestors=_ancestor_bits(local, parents, cu_rows[owner].long(), depths),
        is_chain=_chains(parents, local, owner, num_requests),
    )


def _rows(is_root: torch.Tensor, of_nodes: torch.Tensor, of_root: int) -> torch.Tensor:
    """[T]: ``of_root`` at roots, the nodes' values in order at the other rows."""
    return torch.full_like(is_root, of_root, dtype=of_nodes.dtype).masked_scatter_(
        ~is_root, of_nodes
    )


def _ancestor_bits(
    local: torch.Tensor, parents: torch.Tensor, start: torch.Tensor, depths: torch.Tensor
) -> torch.Tensor:
    """[T, W] int64: the row's own bit and its ancestors', by walking all rows up at once."""
    num_rows = local.shape[0]
    words = num_words(int(local.max()) + 1 if num_rows else 1)
    bits = torch.zeros(num_rows, words, dtype=torch.int64, device=local.device)
    row = torch.arange(num_rows, device=local.device)
    climber = row
    for _ in range(int(depths.max()) + 1 if num_rows else 0):
        j = local[climber]
        bit = torch.ones_like(j) << (j % BITS_PER_WORD)
        bits[row, j // BITS_PER_WORD] |= bit
        up = parents[climber].long()
        climber = torch.where(up < 0, climber, start + up)
    return bits


def _chains(
    parents: torch.Tensor, local: torch.Tensor, owner: torch.Tensor, num_requests: int
) -> torch.Tensor:
    branches = (parents != local - 1).to(torch.int32)
    return (
        torch.zeros(num_requests, dtype=torch.int32, device=owner.device).index_add_(
            0, owner, branches
        )
        == 0
    )
