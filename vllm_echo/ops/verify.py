# SPDX-License-Identifier: Apache-2.0
"""Stages *pack* and *verify*: rows of one forward, and their attention."""

import torch

from vllm_echo.ops.library import call


def read_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    slots: torch.Tensor,
    scheduled: torch.Tensor,
    num_scheduled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Structure of the scheduled tokens: the stored tree's if they lead it, else a chain's.

    Args:
        tokens, parents, depths: [S, N] int32, as ``TreeTable`` has them.
        num_nodes: [S] int32, nodes stored.
        slots: [R] int64, rows of the table.
        scheduled: [R, K] int32 tokens, K <= N; those from ``num_scheduled`` on are not looked at.
        num_scheduled: [R] int32.

    Returns:
        parents, depths [R, K] int32.
    """
    table = (tokens, parents, depths, num_nodes)
    return call("read_trees", *table, slots, scheduled, num_scheduled)


def pack_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Flatten the trees of a step, request by request: the root, then the nodes in order.

    Args:
        tokens, parents, depths: [R, N] int32, the nodes of each request as ``DraftTrees`` has
            them; a parent is -1 (the root) or an earlier node. Entries at or beyond the
            request's ``num_nodes`` are not read.
        num_nodes: [R] int32, 0 to N.
        max_rows: T below; rows that are left are padding (-1, -1, 0 and no ancestor). A device
            needs it, as it does not wait for the counts.

    Returns:
        cu_rows [R + 1] int32, tokens, parents, depths [T] int32, ancestors [T, W] int64,
        as ``vllm_echo.core.tree.SuperTree`` has them; W words hold the largest tree, or, with
        ``max_rows``, a tree of N nodes.

    ValueError: a count out of range, or a parent that is not before its node.
    """
    return call("pack_trees", tokens, parents, depths, num_nodes, max_rows)


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_rows: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tree rows over the paged CPU cache; returns ``out``.

    A row attends to slots 0 .. context_lens[r] - 1 of its request r and, beyond them, to slot
    context_lens[r] + j for each set bit j of its mask. A row that sees no slot gives zeros.
    Softmax and sums are in float32; a row's result depends neither on the batch around it nor
    on the number of threads. Slots that a row does not see are never part of its arithmetic.

    Args:
        query: [T, H, D] float32, bfloat16 or float16; D contiguous, a multiple of 16 up to 256.
        key_cache: [num_blocks, Hkv, block_size, D] as vLLM's CPU backend makes it,
            ``kv_cache.view(num_blocks, Hkv, 2 * block_size, D).chunk(2, dim=2)[0]``, of the
            query's dtype; what its blocks hold is described above. block_size % 16 == 0,
            H % Hkv == 0.
        value_cache: the other chunk.
        block_table: [R, max_blocks] int32 physical blocks; only those behind visible slots are
            looked at.
        cu_rows: [R + 1] int32 prefix sums of rows per request, from 0 to T.
        context_lens: [R] int32, slots that every row of the request attends to.
        mask: [T, W] int64; bit j % 64 of word j // 64 is bit j.
        scale: multiplies the scores.
        softcap: c > 0 turns a score s into c * tanh(s / c); 0 is off.
        out: [T, H, D] like query (D contiguous), overwritten; None allocates.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kv = (key_cache, value_cache, block_table)
    call("tree_attention", query, *kv, cu_rows, context_lens, mask, scale, softcap, out)
    return out


def tree_part_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_rows: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of tree rows among themselves, to be merged with that over their context. On a
    CUDA device only: on a CPU ``tree_attention`` does both at once.

    A row attends to the rows of its request that its ancestor bits name. Softmax and sums are in
    float32. A row that sees none, or belongs to no request, gives zeros and -inf.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, D contiguous: 64, 96, 128 or 256.
        key, value: [T, Hkv, D] of the query's dtype, the step's own; H % Hkv == 0.
        cu_rows: [R + 1] int32, as ``pack_trees`` makes it.
        ancestors: [T, W] int64, likewise; bits beyond the rows of a request are not looked at.
        scale: multiplies the scores.
        softcap: c > 0 turns a score s into c * tanh(s / c); 0 is off.

    Returns:
        out [T, H, D] like query; lse [H, T] float32, natural log of the sum of exp(score), as
        vLLM's merge_attn_states takes it.
    """
    return call("tree_part_attention", query, key, value, cu_rows, ancestors, scale, softcap)
