# SPDX-License-Identifier: Apache-2.0
"""Good arguments of every operator, and how to call it with them; test_door spoils them."""

import torch

from tests.ops.kit import NAN, make_batch
from vllm_echo import ops

ATTENTION_NAMES = [
    "query",
    "key_cache",
    "value_cache",
    "block_table",
    "cu_rows",
    "context_lens",
    "mask",
]


def attention_arguments() -> dict[str, torch.Tensor]:
    batch = make_batch([[-1, 0, 0], [-1]], [20, 5])
    arguments = dict(zip(ATTENTION_NAMES, batch.attention_args, strict=False))
    return {**arguments, "out": torch.full_like(batch.query, NAN)}


def commit_arguments() -> dict[str, torch.Tensor]:
    return {
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "root_slots": torch.zeros(1, dtype=torch.int32),
        "path_rows": torch.tensor([[2]], dtype=torch.int32),
        "path_lens": torch.ones(1, dtype=torch.int32),
    }


def accept_arguments() -> dict[str, torch.Tensor]:
    return {
        "target_tokens": torch.tensor([1, 2, 3]),
        "cu_rows": torch.tensor([0, 2, 3], dtype=torch.int32),
        "tokens": torch.tensor([0, 1, 0], dtype=torch.int32),
        "parents": torch.tensor([-1, 0, -1], dtype=torch.int32),
    }


def greedy_arguments() -> dict[str, torch.Tensor]:
    trees = accept_arguments()
    del trees["target_tokens"]
    return {"logits": torch.eye(3, 40), **trees}


def sampled_arguments() -> dict[str, torch.Tensor]:
    return {
        **greedy_arguments(),
        "depths": torch.tensor([0, 1, 0], dtype=torch.int32),
        "temperatures": torch.tensor([0.7, 0.0]),
        "seeds": torch.tensor([5, 6]),
        "root_positions": torch.tensor([10, 20]),
    }


def pack_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6], [7, 0]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
        "depths": torch.tensor([[1, 2], [1, 0]], dtype=torch.int32),
        "num_nodes": torch.tensor([2, 1], dtype=torch.int32),
    }


def order_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6, 7], [8, 9, 0]], dtype=torch.int32),
        "parents": torch.tensor([[-1, -1, 1], [-1, 0, -1]], dtype=torch.int32),
        "depths": torch.tensor([[1, 1, 2], [1, 2, 1]], dtype=torch.int32),
        "scores": torch.tensor([[-2.0, -0.5, -1.0], [-0.25, -0.25, -torch.inf]]),
        "caps": torch.tensor([3, 3], dtype=torch.int32),
        "deepest": torch.tensor([2, 2], dtype=torch.int32),
        "thresholds": torch.tensor([0.2, torch.nan]),
    }


def admit_arguments() -> dict[str, torch.Tensor]:
    return {"keys": torch.tensor([[5, 6, 2**63 - 1], [4, 9, 10]])}


def size_arguments() -> dict[str, torch.Tensor]:
    return {**admit_arguments(), "added_ms": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)}


def score_arguments() -> dict[str, torch.Tensor]:
    return {
        "log_probs": torch.tensor([[[-0.5, -1.0, -3.0]], [[-0.1, -9.0, -torch.inf]]]),
        "requests": torch.tensor([0, 2]),
        "sampled": torch.tensor([False, True, True]),
        "curves": torch.tensor([[0.0, 1.0], [-0.5, 0.8]]),
    }


def append_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.zeros(3, 4, dtype=torch.int32),
        "parents": torch.zeros(3, 4, dtype=torch.int32),
        "scores": torch.full((3, 4), -torch.inf),
        "requests": torch.tensor([0, 2]),
        "child_tokens": torch.arange(8, dtype=torch.int32).view(2, 2, 2),
        "child_scores": -torch.arange(8.0).view(2, 2, 2),
        "chain_only": torch.tensor([False, False, True]),
        "parent_scores": torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]),
        "parent_columns": torch.tensor([[1, 0], [0, 2]]),
    }


def layer_arguments() -> dict[str, torch.Tensor]:
    return {
        "best": torch.tensor([-0.5, -3.0, -torch.inf]),
        "active": torch.tensor([True, True, True]),
        "caps": torch.tensor([4, 4, 4], dtype=torch.int32),
        "deepest": torch.tensor([4, 1, 4], dtype=torch.int32),
        "num_layers": torch.tensor([1, 0, 1], dtype=torch.int32),
        "truncated": torch.tensor([False, False, False]),
    }


def gain_arguments() -> dict[str, torch.Tensor]:
    return {
        "best": torch.tensor([-0.5, -3.0, -torch.inf]),
        "active": torch.tensor([True, True, True]),
        "deepest": torch.tensor([4, 4, 4], dtype=torch.int32),
        "sampled": torch.tensor([False, True, False]),
        "best_child": torch.tensor([0.7, 0.5], dtype=torch.float64),
    }


def frontier_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32),
        "scores": torch.tensor([[-2.0, -0.5, -1.0, -0.5], [-0.25, -0.25, -1.0, -torch.inf]]),
        "active": torch.tensor([False, True]),
        "own_bits": torch.tensor([[4], [8], [16]]),
        "previous_requests": torch.tensor([0, 1]),
        "ancestors": torch.tensor([[[1], [2]], [[1], [2]]]),
    }


def read_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6], [7, 0], [8, 9]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0], [-1, 0], [-1, -1]], dtype=torch.int32),
        "depths": torch.tensor([[1, 2], [1, 0], [1, 1]], dtype=torch.int32),
        "num_nodes": torch.tensor([2, 1, 2], dtype=torch.int32),
        "slots": torch.tensor([2, 0]),
        "scheduled": torch.tensor([[8, 9], [6, -1]], dtype=torch.int32),
        "num_scheduled": torch.tensor([2, 1], dtype=torch.int32),
    }


def call_attention(arguments: dict[str, torch.Tensor]) -> None:
    ops.tree_attention(**arguments, scale=0.2)


def call_commit(arguments: dict[str, torch.Tensor]) -> None:
    ops.commit_kv([torch.zeros(1, 2, 16, 32)], **arguments)


def call_accept(arguments: dict[str, torch.Tensor]) -> None:
    ops.accept_paths(**arguments)


def call_greedy(arguments: dict[str, torch.Tensor]) -> None:
    ops.accept_greedy(**arguments)


def call_sampled(arguments: dict[str, torch.Tensor]) -> None:
    ops.accept_sampled(**arguments)


def call_pack(arguments: dict[str, torch.Tensor]) -> None:
    ops.pack_trees(**arguments)


def call_order(arguments: dict[str, torch.Tensor]) -> None:
    ops.order_trees(**arguments, rule=0, width=True, max_nodes=2)


def call_admit(arguments: dict[str, torch.Tensor]) -> None:
    ops.admit_nodes(**arguments, budget=2)


def call_size(arguments: dict[str, torch.Tensor]) -> None:
    ops.fastest_size(**arguments, num_requests=2, plain_ms=20.0)


def call_score(arguments: dict[str, torch.Tensor]) -> None:
    ops.score_children(**arguments)


def call_append(arguments: dict[str, torch.Tensor]) -> None:
    ops.append_layer(**arguments, first_parent_column=3)


def call_layer(arguments: dict[str, torch.Tensor]) -> None:
    ops.grant_layer(**arguments, depth=1, threshold=0.3, budget=2)


def call_gain(arguments: dict[str, torch.Tensor]) -> None:
    ops.expect_gain(**arguments, depth=1, **GAIN)


def call_frontier(arguments: dict[str, torch.Tensor]) -> None:
    ops.next_frontier(**arguments, top_k=2)


def call_read(arguments: dict[str, torch.Tensor]) -> None:
    ops.read_trees(**arguments)


GAIN = {"price": 0.1, "ms_per_token": 10.0, "request_ms": 0.5, "layer_ms": 0.5}

OPERATORS = [
    ("tree_attention", call_attention, attention_arguments),
    ("commit_kv", call_commit, commit_arguments),
    ("accept_paths", call_accept, accept_arguments),
    ("accept_greedy", call_greedy, greedy_arguments),
    ("accept_sampled", call_sampled, sampled_arguments),
    ("pack_trees", call_pack, pack_arguments),
    ("order_trees", call_order, order_arguments),
    ("admit_nodes", call_admit, admit_arguments),
    ("fastest_size", call_size, size_arguments),
    ("score_children", call_score, score_arguments),
    ("append_layer", call_append, append_arguments),
    ("grant_layer", call_layer, layer_arguments),
    ("expect_gain", call_gain, gain_arguments),
    ("next_frontier", call_frontier, frontier_arguments),
    ("read_trees", call_read, read_arguments),
]
