# SPDX-License-Identifier: Apache-2.0
"""Tree attention, the obvious way: gather the request's KV, mask, softmax, one row at a time."""

import torch


def logical_kv(
    key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, slots, D] float32 of a request, in slot order.

    ``key_cache`` and ``value_cache`` are the CPU views that ``ops.tree_attention`` takes;
    ``blocks`` [n] the physical blocks. A key block's memory is [D, block_size].
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    keys = key_cache[blocks.long()].reshape(-1, num_kv_heads, head_dim, block_size)
    keys = keys.permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_dim)
    values = value_cache[blocks.long()].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    return keys.float(), values.float()


def visible_slots(mask_row: torch.Tensor, context_len: int) -> list[int]:
    """Slots a row attends to, ascending; ``mask_row`` [W] int64."""
    slots = list(range(context_len))
    for word, bits in enumerate(mask_row.tolist()):
        slots += [context_len + 64 * word + bit for bit in range(64) if bits >> bit & 1]
    return slots


def attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """One row: query [H, D], keys and values [Hkv, n, D]; returns [H, D] float32."""
    heads_per_kv = query.shape[0] // keys.shape[0]
    keys = keys.repeat_interleave(heads_per_kv, dim=0)
    values = values.repeat_interleave(heads_per_kv, dim=0)
    scores = torch.einsum("hd,hnd->hn", query.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,hnd->hd", scores.softmax(dim=-1), values)


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
) -> torch.Tensor:
    """What ``ops.tree_attention`` computes, [T, H, D] in the query's dtype."""
    out = torch.zeros_like(query)
    block_size = key_cache.shape[2]
    for r in range(context_lens.shape[0]):
        for row in range(int(cu_rows[r]), int(cu_rows[r + 1])):
            slots = visible_slots(mask[row], int(context_lens[r]))
            if not slots:
                continue
            blocks = block_table[r, : max(slots) // block_size + 1]
            keys, values = logical_kv(key_cache, value_cache, blocks)
            attended = attend_row(query[row], keys[:, slots], values[:, slots], scale, softcap)
            out[row] = attended.to(query.dtype)
    return out
