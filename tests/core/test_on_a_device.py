# SPDX-License-Identifier: Apache-2.0
"""What docs/pipeline.md says a device path can use as it is: nothing in it waits for the device.

No device is needed: fake tensors have shapes and a device but no values, and whoever asks for one
is refused."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_echo.core.accept import accept_given, accept_greedy
from vllm_echo.core.commit import commit_paths, needs_commit
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.decision import Decision
from vllm_echo.core.draft import DraftBatch, limit_requests
from vllm_echo.core.gate import Limits, layers_reached
from vllm_echo.core.pack import pack_trees
from vllm_echo.core.policies import make_policy
from vllm_echo.core.tree import AcceptedPaths, CandidateTrees, DraftTrees, TreeTable
from vllm_echo.ops import library

R, N, L, ROWS = 3, 8, 6, 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(library, "HAS_CUDA", True)
    with FakeTensorMode():
        yield "cuda"


def int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def bools() -> torch.Tensor:
    return torch.empty(R, dtype=torch.bool, device="cuda")


def draft_trees() -> DraftTrees:
    return DraftTrees(int32(R, N), int32(R, N), int32(R, N), int32(R))


def decision_of(**options: object) -> Decision:
    policy = make_policy(EchoConfig(k_max=10, **options))
    return policy.decide(StepLoad(R), policy.offer(StepLoad(R)))


@pytest.mark.parametrize("transfer", [True, False])
def test_limits_are_found(device: str, transfer: bool) -> None:
    decision = decision_of(policy="echo", transfer=transfer)
    batch = DraftBatch(int32(R), bools(), bools(), int32(R), bools())
    limits = limit_requests(batch, decision)
    assert limits.caps.device.type == limits.deepest.device.type == device
    assert limits.caps.dtype == limits.deepest.dtype == torch.int32


@pytest.mark.parametrize("policy", ["static", "chain", "ddd"])
def test_the_layers_of_fixed_shapes_are_reached(policy: str) -> None:
    """On the meta device, which has no values either: columns are views, and a build for CPUs
    makes none of a fake CUDA tensor."""
    decision = decision_of(policy=policy)
    columns = (R, decision.shape.num_candidates)
    numbers, scores = torch.empty(columns, device="meta").int(), torch.empty(columns, device="meta")
    candidates = CandidateTrees(numbers, numbers, numbers, scores)
    each = torch.empty(R, device="meta")
    limits = Limits(each.int(), each.int(), each.bool())
    assert layers_reached(candidates, limits, decision).deepest.shape == (R,)


def test_trees_are_packed_into_the_rows_of_a_forward_and_walked(device: str) -> None:
    tree = pack_trees(draft_trees(), max_rows=ROWS, num_nodes=11)
    assert tree.tokens.shape == (ROWS,) and tree.num_requests == R
    assert tree.num_nodes == 11, "what the host knows, whatever the rows hold"
    targets = torch.empty(ROWS, dtype=torch.int64, device=device)
    logits = torch.empty(ROWS, 40, device=device)
    for paths in (accept_given(tree, targets, L), accept_greedy(tree, logits, L)):
        assert paths.tokens.shape == (R, L + 1) and paths.rows.shape == (R, L)


def test_the_kv_of_paths_is_moved_unasked(device: str) -> None:
    paths = AcceptedPaths(int32(R, L + 1), int32(R, L), int32(R))
    assert needs_commit(paths)
    cache = torch.empty(2, 4, 16, 2, 64, device=device)
    commit_paths([cache], int32(R, 4), int32(R), paths)


def test_who_asks_is_caught(device: str) -> None:
    """The tests above are worth what this shows."""
    with pytest.raises(RuntimeError):  # what it says depends on the build
        pack_trees(draft_trees(), max_rows=ROWS)


def test_a_table_that_graphs_may_hold_does_not_move(device: str) -> None:
    table = TreeTable(4, N, torch.device(device))
    before = table.tokens
    with pytest.raises(RuntimeError, match="the tree table on cuda.* has 4 slots and cannot grow"):
        table.grow()
    assert table.tokens is before and table.num_slots == 4
