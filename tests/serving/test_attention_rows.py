# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step attend through which kernel."""

from pathlib import Path

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids
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
    """Catches decoding rows that go to vLLM's kernel, the slower one for them: lone roots or chains
    beside trees, steps without candidates. Catches as well a batch in which the rows of one kernel
    do not lie side by side, so that every layer gathers them. Budget for a part of the batch, and
    prompts in chunks, so that a step holds everything."""
    options = {"k_max": 6, "gates": []}
    echo = echo_engine(target, head, 4, options, max_num_seqs=8, max_num_batched_tokens=64)
    prompts = random_prompts(24, seed=4, shortest=10, longest=150)
    expected, _ = expect_identity(plain, echo, [greedy()] * 24, prompts=prompts)
    echo.runner.set_options({"k_max": 0})
    without_candidates = echo.generate(prompts, [greedy()] * 24)
    assert token_ids(without_candidates) == token_ids(expected)
    seen = dict.fromkeys(("prompts alone", "roots alone", "roots and prompts", "trees"), 0)
    seen |= dict.fromkeys(("trees and prompts", "lone roots"), 0)
    num_gathered = 0
    for tree, rows, metadata in built:
        of_tree = tree.cu_rows.diff()
        decoding = rows == of_tree
        if not isinstance(metadata, EchoAttentionMetadata):
            assert not bool(decoding.any())
            seen["prompts alone"] += 1
            continue
        assert metadata.tree.cu_rows.diff().tolist() == of_tree[decoding].tolist()
        kind = "trees" if tree.num_nodes else "roots"
        seen["lone roots"] += tree.num_nodes > 0 and int((of_tree[decoding] == 1).any())
        step_rows = torch.arange(int(rows.sum()))
        if metadata.causal is None:
            assert bool(decoding.all())
            both = step_rows[metadata.tree.rows]
            kind = "roots alone" if kind == "roots" else kind
        else:
            both = torch.cat([step_rows[metadata.tree.rows], step_rows[metadata.causal.rows]])
            assert step_rows[metadata.causal.rows].shape[0] == int(rows[~decoding].sum())
            num_gathered += not isinstance(metadata.tree.rows, slice)
            kind = f"{kind} and prompts"
        seen[kind] += 1
        assert sorted(both.tolist()) == step_rows.tolist()
    # A prompt's last chunk may be a single row, and lie between other chunks.
    with_prompts = seen["roots and prompts"] + seen["trees and prompts"]
    assert num_gathered <= 0.2 * with_prompts, (num_gathered, with_prompts)
    assert all(seen.values()), seen
