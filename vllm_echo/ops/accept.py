# SPDX-License-Identifier: Apache-2.0
"""Stages *accept* and *commit*: paths along the target's tokens, and their KV."""

import torch

from vllm_echo.ops.library import call


def accept_paths(
    target_tokens: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree from its root along the target's own tokens.

    At a row, the child that carries target_tokens[row] is stepped into (the first one, should
    two carry it); without such a child the walk ends and target_tokens[row] is its last output.

    Args:
        target_tokens: [T] int64 or int32, the target's next token after each row.
        cu_rows: [R + 1] int32 prefix sums of rows per request, from 0 to T.
        tokens: [T] int32 tokens of the nodes; the root's entry is ignored, and a negative token
            (padding) never matches.
        parents: [T] int32 local row of the parent: -1 for the root, smaller than the own row for
            a node (-1 there detaches it: no walk reaches it). A request that breaks this accepts
            no node.
        max_nodes: L below; longer paths are cut, which loses nothing but their rest.

    Returns:
        out_tokens [R, L + 1] int32: the accepted tokens, then the target's last one, then -1.
        path_rows [R, L] int32: local rows of the accepted nodes, then -1.
        num_accepted [R] int32: nodes accepted.
        L is the largest number of nodes of a request, if not given. A request without rows gives
        only -1.
    """
    return call("accept_paths", target_tokens, cu_rows, tokens, parents, max_nodes)


def accept_greedy(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``accept_paths`` with the most likely token of every row that a walk visits.

    Ties go to the lowest token, and a NaN counts as largest, as in ``torch.argmax``; a walk ends at
    a row that has one. Rows that no walk visits are not read.

    Args:
        logits: [T, V] float32, bfloat16 or float16, V at least 1; V contiguous.
        cu_rows, tokens, parents, max_nodes: as for ``accept_paths``, and so are the results.
    """
    return call("accept_greedy", logits, cu_rows, tokens, parents, max_nodes)


def accept_sampled(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    root_positions: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``accept_paths`` with a token drawn at every row that a walk visits.

    The draw is Gumbel-max: the largest logit / temperature + noise, the noise a function of the
    request's seed, the row's position (its root's plus its depth) and the token alone, as vLLM's
    Model Runner V2 has it. So the tokens are those of plain decoding with the same seed. Ties and
    NaN as in ``accept_greedy``.

    Args:
        logits, cu_rows, tokens, parents, max_nodes: as for ``accept_greedy``.
        depths: [T] int32.
        temperatures: [R] float32; 0 is greedy.
        seeds: [R] int64.
        root_positions: [R] int64; the low 32 bits of a position count.
    """
    trees = (cu_rows, tokens, parents, depths)
    draws = (temperatures, seeds, root_positions)
    return call("accept_sampled", logits, *trees, *draws, max_nodes)


def commit_kv(
    kv_caches: list[torch.Tensor],
    block_table: torch.Tensor,
    root_slots: torch.Tensor,
    path_rows: torch.Tensor,
    path_lens: torch.Tensor,
) -> None:
    """Move the KV of accepted paths into the linear prefix, in every layer, in place.

    For request r and k = 1 .. path_lens[r], slot root_slots[r] + path_rows[r, k - 1] is copied
    bit by bit to slot root_slots[r] + k. Rows that are in place already cost nothing.

    Args:
        kv_caches: one a layer. On a CPU raw caches, [num_blocks, Hkv, block_size, 2 * D] in the
            layout above; any dtype of 1, 2 or 4 bytes; a block's interior contiguous. On a CUDA
            device [2, num_blocks, block_size, Hkv, D], keys and values, any dtype; all of one
            shape and with the same strides, D contiguous; 160 layers at most.
        block_table: [R, max_blocks] int32 physical blocks.
        root_slots: [R] int32 slots of the roots.
        path_rows: [R, P] int32 local rows, strictly increasing, each >= its depth k (which makes
            the order of the copies safe); entries from path_lens[r] on are ignored.
        path_lens: [R] int32 in 0 .. P.

    Raises:
        ValueError: a path does not increase, or leads outside the cache (nothing is moved then).
    """
    call("commit_kv", kv_caches, block_table, root_slots, path_rows, path_lens)
