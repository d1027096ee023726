# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are whose: ragged lists to arrays, accepted paths to row numbers.

NumPy, not torch: these run in every step over a few dozen numbers, where a call costs more than
its work.
"""

import numpy as np
import torch

from vllm_echo.core.tree import AcceptedPaths, SuperTree


def as_rows(drafts: list[list[int]]) -> tuple[torch.Tensor, np.ndarray]:
    """Ragged lists -> [R, N] int32, -1 padded (N at least 1), and lengths [R] int32."""
    counts = np.array([len(draft) for draft in drafts], dtype=np.int32)
    rows = np.full((len(drafts), max(1, counts.max(initial=0))), -1, dtype=np.int32)
    for row, draft in zip(rows, drafts, strict=True):
        row[: len(draft)] = draft
    return torch.from_numpy(rows), counts


def final_rows(
    bounds: np.ndarray, tree: SuperTree, paths: AcceptedPaths
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the step's forward that hold final tokens, request-major: every row up to the
    root's, then the accepted path's. Returns (rows [M] int64, places [M] int64, the requests'
    ends in both [R]): row ``places[i]`` had the cache slot where commit has left row ``rows[i]``.

    ``bounds`` [R + 1]: the requests' first rows in the forward; a request's tree is its last rows.
    """
    if tree.num_nodes == 0:
        rows = np.arange(bounds[-1], dtype=np.int64)
        return rows, rows, bounds[1:]
    starts = bounds[:-1].astype(np.int64)
    first_rows = tree.cu_rows.numpy()
    num_linear = (bounds[1:] - first_rows[1:]) - (bounds[:-1] - first_rows[:-1]) + 1
    lens = num_linear + paths.num_accepted.numpy()
    ends = lens.cumsum()
    owner = np.repeat(np.arange(tree.num_requests), lens)
    local = np.arange(owner.shape[0]) - (ends - lens)[owner]
    first = starts[owner]
    places = first + local
    beyond = local - num_linear[owner]
    on_path = (beyond >= 0).nonzero()[0]
    request = owner[on_path]
    local[on_path] = num_linear[request] - 1 + paths.rows.numpy()[request, beyond[on_path]]
    return first + local, places, ends
