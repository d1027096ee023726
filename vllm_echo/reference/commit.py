# SPDX-License-Identifier: Apache-2.0
"""Committing paths, the obvious way: one slot at a time."""

import torch


def slot_kv(
    kv_cache: torch.Tensor, block_table_row: torch.Tensor, slot: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of a slot, [Hkv, D] each, as views into the raw CPU cache of one layer."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    block = kv_cache[int(block_table_row[slot // block_size])].view(num_kv_heads, -1)
    keys = block[:, : head_dim * block_size].view(num_kv_heads, head_dim, block_size)
    values = block[:, head_dim * block_size :].view(num_kv_heads, block_size, head_dim)
    return keys[:, :, slot % block_size], values[:, slot % block_size]


def commit_kv(
    kv_caches: list[torch.Tensor],
    block_table: torch.Tensor,
    root_slots: torch.Tensor,
    path_rows: torch.Tensor,
    path_lens: torch.Tensor,
) -> None:
    """What ``ops.commit_kv`` does. Reads every source first, so no order can be wrong."""
    for cache in kv_caches:
        moves = []
        for r in range(path_lens.shape[0]):
            root = int(root_slots[r])
            for k in range(1, int(path_lens[r]) + 1):
                source = slot_kv(cache, block_table[r], root + int(path_rows[r, k - 1]))
                moves.append(
                    (slot_kv(cache, block_table[r], root + k), [t.clone() for t in source])
                )
        for (key, value), (new_key, new_value) in moves:
            key.copy_(new_key)
            value.copy_(new_value)
