# SPDX-License-Identifier: Apache-2.0
"""Stage *accept*: lossless acceptance.

The whole rule: at each visited row take the target's own next token, exactly as plain
decoding would; if a child of the row carries that token and the request does not end with it,
step into it; otherwise that token is the step's last output. The output's law is that of
plain decoding for any tree that was built from history and draft outputs alone
(docs/algorithm.md has the argument), and one token is drawn per output token, so a request's
random stream is consumed as in plain decoding.
"""

from collections.abc import Callable

import torch

from vllm_echo import ops
from vllm_echo.core.tree import AcceptedPaths, SuperTree

SampleRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(requests [M] int64, rows [M] int64 into the super-tree) -> the target's next tokens [M]."""

EndsWith = Callable[[int, int], bool]
"""(request, token) -> whether the request's output ends with the token. Asked for the tokens that
lead on along a path, in the path's order, and for none behind an end."""


def never_ends(request: int, token: int) -> bool:
    """``EndsWith`` of requests that nothing but their trees stops."""
    return False


def accept_given(
    tree: SuperTree, target_tokens: torch.Tensor, max_nodes: int | None = None
) -> AcceptedPaths:
    """Walk with ``target_tokens`` [T]: the target's next token at every row, known already.

    ``max_nodes``: L, the longest path that is kept; None is the largest tree, which a device would
    have to be asked for.
    """
    trees = (tree.cu_rows, tree.tokens, tree.parents)
    return AcceptedPaths(*ops.accept_paths(target_tokens, *trees, max_nodes))


def accept_greedy(
    tree: SuperTree, logits: torch.Tensor, max_nodes: int | None = None
) -> AcceptedPaths:
    """Walk along the most likely tokens of ``logits`` [T, V], looking at visited rows only;
    ``max_nodes`` as for ``accept_given``."""
    trees = (tree.cu_rows, tree.tokens, tree.parents)
    return AcceptedPaths(*ops.accept_greedy(logits, *trees, max_nodes))


def end_paths(paths: AcceptedPaths, ends_with: EndsWith) -> AcceptedPaths:
    """Cut each path at the first token with which its request ends: the step's last output."""
    kept = paths.num_accepted.tolist()
    for request, tokens in enumerate(paths.tokens.tolist()):
        for place, token in enumerate(tokens[: kept[request]]):
            if ends_with(request, token):
                kept[request] = place
                break
    num_accepted = paths.num_accepted.new_tensor(kept)
    if torch.equal(num_accepted, paths.num_accepted):
        return paths
    beyond = torch.arange(paths.tokens.shape[1], device=num_accepted.device) > num_accepted[:, None]
    return AcceptedPaths(
        tokens=paths.tokens.masked_fill(beyond, -1),
        rows=paths.rows.masked_fill(beyond[:, 1:], -1),
        num_accepted=num_accepted,
    )


def walk_paths(
    tree: SuperTree, sample: SampleRows, ends_with: EndsWith = never_ends
) -> AcceptedPaths:
    """Walk level by level, asking ``sample`` for the tokens of visited rows only.

    ``sample`` sees every request once at its root, then only the requests that still walk, and
    ``ends_with`` is asked in between: whatever depends on history can be updated there. So it
    needs the host between two levels, and is for requests whose tokens depend on their own path,
    on a CPU. Behind a request's end nothing is sampled.
    """
    num_requests = tree.num_requests
    start = tree.cu_rows[:-1].long()
    walking = torch.arange(num_requests, device=start.device)
    rows = start.clone()
    token_columns: list[torch.Tensor] = []
    row_columns: list[torch.Tensor] = []
    while walking.numel():
        sampled = sample(walking, rows).to(torch.int32)
        token_columns.append(_column(num_requests, walking, sampled))
        child = _child_rows(tree, walking, rows, sampled)
        stepped = child >= 0
        walking, rows, led_by = walking[stepped], child[stepped], sampled[stepped]
        steps = zip(walking.tolist(), led_by.tolist(), strict=True)
        goes_on = [not ends_with(request, token) for request, token in steps]
        walking, rows = walking[goes_on], rows[goes_on]
        if walking.numel():
            row_columns.append(
                _column(num_requests, walking, (rows - start[walking]).to(torch.int32))
            )
    tokens = torch.stack(token_columns, dim=1) if token_columns else tree.tokens.new_empty(0, 1)
    path_rows = (
        torch.stack(row_columns, dim=1) if row_columns else tokens.new_empty(num_requests, 0)
    )
    return AcceptedPaths(tokens, path_rows, (path_rows >= 0).sum(dim=1).to(torch.int32))


def _column(size: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.full((size,), -1, dtype=torch.int32, device=values.device).index_copy_(
        0, index, values
    )


def _child_rows(
    tree: SuperTree, requests: torch.Tensor, rows: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """[M] int64: the super-tree row of the child of rows[m] that carries sampled[m], or -1."""
    first, last = tree.cu_rows[requests].long(), tree.cu_rows[requests + 1].long()
    span = torch.arange(int((last - first).max()), device=rows.device)
    candidate = first[:, None] + span
    inside = candidate < last[:, None]
    candidate = candidate.clamp(max=tree.tokens.shape[0] - 1)
    match = (
        inside
        & (candidate > rows[:, None])
        & (sampled[:, None] >= 0)
        & (tree.parents[candidate] == (rows - first)[:, None])
        & (tree.tokens[candidate] == sampled[:, None])
    )
    found = match.any(dim=1)
    return torch.where(found, first + match.int().argmax(dim=1), -1)
