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


def pack_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6], [7, 0]], dtype=torch.int32),
        "parents": torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
        "depths": torch.tensor([[1, 2], [1, 0]], dtype=torch.int32),
        "num_nodes": torch.tensor([2, 1], dtype=torch.int32),
    }


def rank_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6, 7], [8, 9, 0]], dtype=torch.int32),
        "parents": torch.tensor([[-1, -1, 1], [-1, 0, -1]], dtype=torch.int32),
        "depths": torch.tensor([[1, 1, 2], [1, 2, 1]], dtype=torch.int32),
        "scores": torch.tensor([[-2.0, -0.5, -1.0], [-0.25, -0.25, -torch.inf]]),
    }


def paying_arguments() -> dict[str, torch.Tensor]:
    return {
        "scores": torch.tensor([[-0.25, -2.0], [-0.5, -torch.inf]]),
        "caps": torch.tensor([2, 1], dtype=torch.int32),
        "added_ms": torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64),
    }


def frontier_arguments() -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32),
        "scores": torch.tensor([[-2.0, -0.5, -1.0, -0.5], [-0.25, -0.25, -1.0, -torch.inf]]),
        "requests": torch.tensor([1]),
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


def call_pack(arguments: dict[str, torch.Tensor]) -> None:
    ops.pack_trees(**arguments)


def call_rank(arguments: dict[str, torch.Tensor]) -> None:
    ops.rank_trees(**arguments, max_nodes=2)


def call_paying(arguments: dict[str, torch.Tensor]) -> None:
    ops.best_paying(**arguments, num_requests=2, plain_ms=20.0)


def call_frontier(arguments: dict[str, torch.Tensor]) -> None:
    ops.next_frontier(**arguments, top_k=2)


def call_read(arguments: dict[str, torch.Tensor]) -> None:
    ops.read_trees(**arguments)


OPERATORS = [
    ("tree_attention", call_attention, attention_arguments),
    ("commit_kv", call_commit, commit_arguments),
    ("accept_paths", call_accept, accept_arguments),
    ("accept_greedy", call_greedy, greedy_arguments),
    ("pack_trees", call_pack, pack_arguments),
    ("rank_trees", call_rank, rank_arguments),
    ("best_paying", call_paying, paying_arguments),
    ("next_frontier", call_frontier, frontier_arguments),
    ("read_trees", call_read, read_arguments),
]
