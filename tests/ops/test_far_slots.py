# SPDX-License-Identifier: Apache-2.0
"""Caches of more than 2^31 elements: memory that is reserved, of which a few pages are touched."""

import torch

from vllm_echo import ops
from vllm_echo.reference import commit as reference

HEADS, BLOCK, DIM = 2, 16, 32
PER_BLOCK = HEADS * BLOCK * 2 * DIM
NUM_BLOCKS = 2**31 // PER_BLOCK + 40
FAR = [NUM_BLOCKS - 1, 3, NUM_BLOCKS - 7, 2**31 // PER_BLOCK + 1]
"""Blocks before and beyond element 2^31."""


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def far_and_near() -> tuple[torch.Tensor, torch.Tensor]:
    """The same blocks in a huge cache, and by themselves."""
    far = torch.empty(NUM_BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
    assert far.numel() > 2**31
    near = torch.randn(len(FAR), HEADS, BLOCK, 2 * DIM).bfloat16()
    far[FAR] = near
    return far, near


def test_rows_are_moved_far_out() -> None:
    far, near = far_and_near()
    path = (int32([10]), int32([[2, 5, 30, 40]]), int32([4]))
    reference.commit_kv([near], int32([[0, 1, 2, 3]]), *path)
    ops.commit_kv([far], int32([FAR]), *path)
    assert torch.equal(far[FAR], near)


def test_rows_far_out_are_attended_to(simd: str) -> None:
    far, near = far_and_near()
    query = torch.randn(3, 4, DIM).bfloat16()
    rows = (int32([0, 3]), int32([50]), torch.tensor([[1], [3], [5]]), 0.2)

    def attend(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        views = cache.view(cache.shape[0], HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
        return ops.tree_attention(query, *views, int32([blocks]), *rows)

    out = attend(far, FAR)
    assert torch.equal(out, attend(near, [0, 1, 2, 3]))
    assert out.isfinite().all()
