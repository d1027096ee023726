# SPDX-License-Identifier: Apache-2.0
"""The identity tests can fail: take away one thing that trees need, and they do."""

from collections.abc import Callable

import pytest

from tests.serving.harness import Engine, random_prompts, token_ids, truths_of
from tests.serving.test_identity import greedy
from vllm_echo.integration.cpu import runner as runner_module
from vllm_echo.integration.cpu.attention import EchoCPUAttentionMetadataBuilder


def without_compaction(monkeypatch: pytest.MonkeyPatch, echo: Engine) -> None:
    monkeypatch.setattr(runner_module, "commit_paths", lambda *args: None)


def with_linear_positions(monkeypatch: pytest.MonkeyPatch, echo: Engine) -> None:
    runner = echo.runner
    pack_step = runner.pipeline.pack_step

    def linear(*args):
        tree = pack_step(*args)
        starts = tree.cu_rows[:-1].long().repeat_interleave(tree.cu_rows.diff().long())
        tree.depths = (starts.new_tensor(range(len(starts))) - starts).to(tree.depths.dtype)
        return tree

    monkeypatch.setattr(runner.pipeline, "pack_step", linear)


def with_a_causal_mask(monkeypatch: pytest.MonkeyPatch, echo: Engine) -> None:
    build = EchoCPUAttentionMetadataBuilder.build

    def causal(self, *args, **kwargs):
        self.super_tree = None
        return build(self, *args, **kwargs)

    monkeypatch.setattr(EchoCPUAttentionMetadataBuilder, "build", causal)


@pytest.mark.parametrize("ablate", [without_compaction, with_linear_positions, with_a_causal_mask])
def test_an_ablated_tree_decodes_something_else(
    plain: Engine, echo: Engine, monkeypatch: pytest.MonkeyPatch, ablate: Callable
) -> None:
    prompts, params = random_prompts(24, seed=8), [greedy()] * 24
    expected = plain.generate(prompts, params)
    echo.follow(truths_of(expected))
    whole = token_ids(echo.generate(prompts, params))
    assert whole == token_ids(expected)
    echo.record.clear()
    with monkeypatch.context() as patched:
        ablate(patched, echo)
        ablated = token_ids(echo.generate(prompts, params))
    assert echo.record.accepted > 0
    equal = sum(a == b for a, b in zip(ablated, whole, strict=True))
    assert equal < len(prompts), "an engine without it gives the same output: the test has no power"
