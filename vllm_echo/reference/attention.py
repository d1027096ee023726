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


def row_scores(
    query: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """One row: query [H, D], keys [Hkv, n, D]; [H, n] float32."""
    keys = keys.float().repeat_interleave(query.shape[0] // keys.shape[0], dim=0)
    scores = torch.einsum("hd,hnd->hn", query.float(), keys) * scale
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def attend_row(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row: scores [H, n], values [Hkv, n, D]; [H, D] float32."""
    values = values.float().repeat_interleave(scores.shape[0] // values.shape[0], dim=0)
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
            scores = row_scores(query[row], keys[:, slots], scale, softcap)
            out[row] = attend_row(scores, values[:, slots]).to(query.dtype)
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
    """What ``ops.tree_part_attention`` returns, with ``out`` in float32."""
    out = torch.zeros(query.shape)
    lse = torch.full((query.shape[1], query.shape[0]), -torch.inf)
    for start, end in zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True):
        for row in range(start, end):
            bits = visible_slots(ancestors[row], 0)
            seen = [start + bit for bit in bits if start + bit < end]
            if seen:
                scores = row_scores(query[row], key[seen].transpose(0, 1), scale, softcap)
                out[row] = attend_row(scores, value[seen].transpose(0, 1))
                lse[:, row] = scores.logsumexp(dim=-1)
    return out, lse
