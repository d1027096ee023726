# SPDX-License-Identifier: Apache-2.0
"""What the operator tests share: poisoned caches, random trees, masks, tolerances."""

from dataclasses import dataclass

import torch

from vllm_echo.reference.commit import slot_kv

NAN = float("nan")

# Operator and reference compute in float32 from the same inputs and differ in the order of the
# sums. In 16 bits they may then round to neighbouring values: one unit in the last place, which
# is at most 2^-7 of a bfloat16 and 2^-10 of a float16.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
}


@dataclass
class Batch:
    """A ragged batch of tree requests with its cache. Slots that nothing wrote hold NaN."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_rows: torch.Tensor
    context_lens: torch.Tensor
    mask: torch.Tensor
    scale: float

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return cache_views(self.kv_cache)

    @property
    def attention_args(self) -> tuple:
        """Arguments of ``tree_attention`` up to the scale."""
        tables = (self.block_table, self.cu_rows, self.context_lens, self.mask)
        return (self.query, *self.caches, *tables, self.scale)


def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value views, made as vLLM's CPU attention backend makes them."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    key_cache, value_cache = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, 2)
    return key_cache, value_cache


def tree_visibility(parents: list[int]) -> torch.Tensor:
    """[n, n] bool: row i sees row j, its ancestor or itself."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
    return visible


def random_parents(num_rows: int, generator: torch.Generator) -> list[int]:
    """Any tree: the parent of a row is some earlier row."""
    return [-1] + [int(torch.randint(row, (1,), generator=generator)) for row in range(1, num_rows)]


def chain_parents(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


def pack_mask(visible: list[torch.Tensor], num_words: int | None = None) -> torch.Tensor:
    """[T, W] int64 from each request's [rows, bits] bool."""
    if num_words is None:
        num_words = max([1] + [-(-rows.shape[1] // 64) for rows in visible])
    words = []
    for rows in visible:
        for row in rows.tolist():
            value = sum(1 << bit for bit, seen in enumerate(row) if seen)
            words.append([value >> 64 * word & (1 << 64) - 1 for word in range(num_words)])
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int64).reshape(len(words), num_words)


def make_batch(
    trees: list[list[int]],
    contexts: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_blocks: int = 1,
) -> Batch:
    """Requests with the given trees (parents of each row) behind the given contexts."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    rows = [len(tree) for tree in trees]
    slots = [context + n for context, n in zip(contexts, rows, strict=True)]
    needed = [-(-n // block_size) for n in slots]
    num_blocks = sum(needed) + spare_blocks
    kv_cache = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_dim), NAN, dtype=dtype)
    order = torch.randperm(num_blocks, generator=generator).int()
    # Entries behind a request's last block are as wrong as they can be: nothing may read them.
    block_table = torch.full((len(trees), max([1, *needed])), -7, dtype=torch.int32)
    for r, n in enumerate(needed):
        block_table[r, :n] = order[sum(needed[:r]) : sum(needed[:r]) + n]
        for slot in range(slots[r]):
            for part in slot_kv(kv_cache, block_table[r], slot):
                part.copy_(torch.randn(part.shape, generator=generator))
    return Batch(
        query=torch.randn(sum(rows), num_heads, head_dim, generator=generator).to(dtype),
        kv_cache=kv_cache,
        block_table=block_table,
        cu_rows=torch.tensor([0, *rows]).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        mask=pack_mask([tree_visibility(tree) for tree in trees]),
        scale=head_dim**-0.5,
    )
