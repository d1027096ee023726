# SPDX-License-Identifier: Apache-2.0
"""What torch.compile and opcheck are told about the operators."""

from functools import partial

import torch

from vllm_echo.ops.library import require_devices

# Fake kernels: shapes for torch.compile and opcheck. Fake tensors keep their device, but a real
# meta tensor is refused: one among CPU tensors would make the call do nothing.


@torch.library.register_fake("vllm_echo::tree_attention")
def _(*arguments: object) -> None:
    require_devices("tree_attention", arguments)


@torch.library.register_fake("vllm_echo::commit_kv")
def _(*arguments: object) -> None:
    require_devices("commit_kv", arguments)


@torch.library.register_fake("vllm_echo::tree_part_attention")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_rows: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    require_devices("tree_part_attention", (query, key, value, cu_rows, ancestors, scale, softcap))
    num_rows, num_heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(num_heads, num_rows, dtype=torch.float32)


def _known_or_dynamic(size: int | None) -> int | torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size() if size is None else size


def _fake_accept(
    op: str,
    target: torch.Tensor,
    cu_rows: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_nodes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require_devices(op, (target, cu_rows, tokens, parents, max_nodes))
    num_requests = cu_rows.shape[0] - 1
    num_nodes = _known_or_dynamic(max_nodes)  # the largest tree
    return (
        tokens.new_empty(num_requests, num_nodes + 1),
        tokens.new_empty(num_requests, num_nodes),
        tokens.new_empty(num_requests),
    )


torch.library.register_fake("vllm_echo::accept_paths")(partial(_fake_accept, "accept_paths"))
torch.library.register_fake("vllm_echo::accept_greedy")(partial(_fake_accept, "accept_greedy"))


@torch.library.register_fake("vllm_echo::accept_sampled")
def _(
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
    draws = (depths, temperatures, seeds, root_positions)
    require_devices("accept_sampled", (logits, cu_rows, tokens, parents, *draws, max_nodes))
    return _fake_accept("accept_greedy", logits, cu_rows, tokens, parents, max_nodes)


@torch.library.register_fake("vllm_echo::pack_trees")
def _(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    max_rows: int | None = None,
) -> tuple[torch.Tensor, ...]:
    require_devices("pack_trees", (tokens, parents, depths, num_nodes, max_rows))
    num_rows = _known_or_dynamic(max_rows)
    num_words = _known_or_dynamic(None if max_rows is None else (tokens.shape[1] + 64) // 64)
    return (
        tokens.new_empty(tokens.shape[0] + 1),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows),
        tokens.new_empty(num_rows, num_words, dtype=torch.int64),
    )


@torch.library.register_fake("vllm_echo::order_trees")
def _(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    thresholds: torch.Tensor,
    rule: int,
    width: bool,
    max_nodes: int,
) -> tuple[torch.Tensor, ...]:
    limits = (caps, deepest, thresholds, rule, width, max_nodes)
    require_devices("order_trees", (tokens, parents, depths, scores, *limits))
    shape = tokens.shape[0], max_nodes
    keys = tokens.new_empty(shape, dtype=torch.int64)
    return (*(tokens.new_empty(shape) for _ in range(3)), keys)


@torch.library.register_fake("vllm_echo::fastest_size")
def _(keys: torch.Tensor, *others: object) -> torch.Tensor:
    require_devices("fastest_size", (keys, *others))
    return keys.new_empty(())


@torch.library.register_fake("vllm_echo::admit_nodes")
def _(keys: torch.Tensor, budget: int) -> torch.Tensor:
    require_devices("admit_nodes", (keys, budget))
    return keys.new_empty(keys.shape[0], dtype=torch.int32)


@torch.library.register_fake("vllm_echo::score_children")
def _(log_probs: torch.Tensor, *others: object) -> torch.Tensor:
    require_devices("score_children", (log_probs, *others))
    return torch.empty_like(log_probs)


@torch.library.register_fake("vllm_echo::append_layer")
def _(
    tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, *others: object
) -> torch.Tensor:
    require_devices("append_layer", (tokens, parents, scores, *others))
    return scores.new_empty(scores.shape[0])


@torch.library.register_fake("vllm_echo::grant_layer")
def _(
    best: torch.Tensor, active: torch.Tensor, *others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    require_devices("grant_layer", (best, active, *others))
    return active.new_empty(active.shape), active.new_empty(3, dtype=torch.int64)


@torch.library.register_fake("vllm_echo::expect_gain")
def _(best: torch.Tensor, active: torch.Tensor, *others: object) -> torch.Tensor:
    require_devices("expect_gain", (best, active, *others))
    return active.new_empty(active.shape)


@torch.library.register_fake("vllm_echo::schedule_budget")
def _(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    caps: torch.Tensor,
    deepest: torch.Tensor,
    thresholds: torch.Tensor,
    budget: int,
    width: bool,
    max_nodes: int,
) -> tuple[torch.Tensor, ...]:
    require_devices(
        "schedule_budget",
        (tokens, parents, depths, scores, caps, deepest, thresholds, budget, width, max_nodes),
    )
    shape = tokens.shape[0], torch.sym_min(max_nodes, tokens.shape[1])
    num_requests = tokens.shape[0]
    return (
        *(tokens.new_empty(shape) for _ in range(3)),
        scores.new_empty(shape),
        tokens.new_empty(num_requests),
        tokens.new_empty(num_requests),
        tokens.new_empty(num_requests, dtype=torch.bool),
        tokens.new_empty(thresholds.shape[0], 3, dtype=torch.int64),
    )


@torch.library.register_fake("vllm_echo::next_frontier")
def _(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    own_bits: torch.Tensor,
    *others: object,
) -> tuple[torch.Tensor, ...]:
    require_devices("next_frontier", (tokens, scores, active, own_bits, *others))
    shape = torch.library.get_ctx().new_dynamic_size(), own_bits.shape[0]
    return (
        own_bits.new_empty(shape[0]),
        tokens.new_empty(shape),
        own_bits.new_empty(shape),
        own_bits.new_empty(*shape, own_bits.shape[1]),
        own_bits.new_empty(shape),
        scores.new_empty(shape),
    )


@torch.library.register_fake("vllm_echo::read_trees")
def _(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    require_devices("read_trees", arguments)
    scheduled = arguments[5]
    return scheduled.new_empty(scheduled.shape), scheduled.new_empty(scheduled.shape)
