# SPDX-License-Identifier: Apache-2.0
"""Stage *commit*: the KV of accepted paths becomes the linear prefix that the engine knows.

A node's KV was written at slot = root slot + row. The accepted path moves to root slot
+ 1, + 2, ... in the same step, before anything reads it; the engine's own accounting
(scheduled 1 + n, accepted a, rejected n - a) then needs no change. Path rows ascend and
row k of a path lies at or beyond k, so moving in path order never overwrites a source.
"""

import torch

from vllm_echo import ops
from vllm_echo.core.tree import AcceptedPaths


def needs_commit(paths: AcceptedPaths) -> bool:
    """False when every accepted path is known to lie where it belongs already. A device is not
    asked: there rows in place cost the move next to nothing, and the answer a wait."""
    if not paths.rows.is_cpu:
        return True
    if paths.rows.shape[1] == 0:
        return False
    linear = torch.arange(
        1, paths.rows.shape[1] + 1, dtype=paths.rows.dtype, device=paths.rows.device
    )
    return bool(((paths.rows != linear) & (paths.rows >= 0)).any())


def commit_paths(
    kv_caches: list[torch.Tensor],
    block_table: torch.Tensor,
    root_slots: torch.Tensor,
    paths: AcceptedPaths,
) -> None:
    """Move the accepted rows' KV in every layer's cache.

    ``kv_caches``: per layer, in the cache layout that ``ops.commit_kv`` documents;
    ``block_table`` [R, B] int32; ``root_slots`` [R] int32, logical positions of the roots.
    """
    if needs_commit(paths):
        ops.commit_kv(kv_caches, block_table, root_slots, paths.rows, paths.num_accepted)
