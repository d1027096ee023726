# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step attend through which kernel."""

from pathlib import Path

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from tests.serving.harness import Engine, echo_engine, random_prompts
from tests.serving.test_identity import expect_identity, greedy
from vllm_echo.core.tree import SuperTree
from vllm_echo.integration.cpu.attention import (
    EchoAttentionMetadata,
    EchoCPUAttentionMetadataBuilder,
)

Built = tuple[SuperTree, torch.Tensor, CPUAttentionMetadata]
"""The super-tree of a step, [R] rows of its requests, and what the builder made of them."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    """What every step of the target attended by."""
    steps: list[Built] = []
    build = EchoCPUAttentionMetadataBuilder.build

    def watched(
        self: EchoCPUAttentionMetadataBuilder,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = build(self, common_prefix_len, common_attn_metadata, fast_build)
        if self.super_tree is not None:
            rows = common_attn_metadata.query_start_loc.diff()
            steps.append((self.super_tree, rows, metadata))
        return metadata

    monkeypatch.setattr(EchoCPUAttentionMetadataBuilder, "build", watched)
    return steps


def test_the_super_tree_has_one_kernel_and_prompts_the_other(
    plain: Engine, target: Path, head: Path, built: list[Built]
) -> None:
    """Catches lone roots or chains that go to vLLM's kernel beside trees: then the rows of every
    step are taken apart and put together in every layer. Budget for a part of the batch, and
    prompts in chunks, so that a step holds everything."""
    options = {"k_max": 6, "gates": []}
    echo = echo_engine(target, head, 4, options, max_num_seqs=8, max_num_batched_tokens=64)
    expect_identity(
        plain, echo, [greedy()] * 24, prompts=random_prompts(24, seed=4, shortest=10, longest=150)
    )
    seen = {"none": 0, "all": 0, "prompts": 0, "lone roots": 0}
    for tree, rows, metadata in built:
        if tree.num_nodes == 0:
            assert not isinstance(metadata, EchoAttentionMetadata)
            seen["none"] += 1
            continue
        assert isinstance(metadata, EchoAttentionMetadata)
        of_tree = tree.cu_rows.diff()
        decoding = rows == of_tree
        assert metadata.tree.cu_rows.diff().tolist() == of_tree[decoding].tolist()
        seen["lone roots"] += int((of_tree[decoding] == 1).any())
        if metadata.causal is None:
            assert bool(decoding.all())
            assert metadata.tree.rows is None
            seen["all"] += 1
        else:
            assert metadata.tree.rows is not None
            both = torch.cat([metadata.tree.rows, metadata.causal.rows])
            assert sorted(both.tolist()) == list(range(int(rows.sum())))
            assert metadata.causal.rows.shape[0] == int(rows[~decoding].sum())
            seen["prompts"] += 1
    assert all(seen.values()), seen
