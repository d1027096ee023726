# SPDX-License-Identifier: Apache-2.0
"""Accepting paths, the obvious way: one request, one row at a time."""

import torch


def accept_one(
    target_tokens: list[int], tokens: list[int], parents: list[int]
) -> tuple[list[int], list[int]]:
    """Output tokens and path rows of one request; see ``ops.accept_paths``."""
    if not parents:
        return [], []
    if any(not -1 <= parent < row for row, parent in enumerate(parents)):
        return [target_tokens[0]], []
    path: list[int] = []
    current = 0
    while True:
        wanted = target_tokens[current]
        children = [row for row in range(1, len(parents)) if parents[row] == current]
        matching = [row for row in children if tokens[row] == wanted and wanted >= 0]
        if not matching:
            return [tokens[row] for row in path] + [wanted], path
        current = matching[0]
        path.append(current)


def accept_paths(
    target_tokens: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``ops.accept_paths`` returns."""
    spans = list(zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True))
    max_nodes = max([0] + [end - start - 1 for start, end in spans])
    out_tokens = torch.full((len(spans), max_nodes + 1), -1, dtype=torch.int32)
    path_rows = torch.full((len(spans), max_nodes), -1, dtype=torch.int32)
    num_accepted = torch.zeros(len(spans), dtype=torch.int32)
    for r, (start, end) in enumerate(spans):
        output, path = accept_one(
            target_tokens[start:end].tolist(),
            tokens[start:end].tolist(),
            parents[start:end].tolist(),
        )
        out_tokens[r, : len(output)] = torch.tensor(output, dtype=torch.int32)
        path_rows[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
        num_accepted[r] = len(path)
    return out_tokens, path_rows, num_accepted


def accept_greedy(
    logits: torch.Tensor, cu_rows: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``ops.accept_greedy`` returns."""
    return accept_paths(logits.float().argmax(dim=-1), cu_rows, tokens, parents)
