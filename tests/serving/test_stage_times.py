# SPDX-License-Identifier: Apache-2.0
"""What the stages of a step are charged with."""

import time

import pytest
from vllm import SamplingParams

from tests.serving.harness import Engine, random_prompts

DELAY = 0.03


def test_the_targets_logits_are_a_stage_of_their_own(
    echo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches half of a step's time under "rest", where it looks like the scheduler's: the output
    layer is the target's, outside its forward, and none of the head's."""
    target = echo.runner.model
    compute_logits = target.compute_logits

    def slowly(*args, **kwargs):
        time.sleep(DELAY)
        return compute_logits(*args, **kwargs)

    monkeypatch.setattr(target, "compute_logits", slowly)
    echo.runner.timer.start_log()
    echo.generate(random_prompts(3, seed=7), SamplingParams(max_tokens=6, ignore_eos=True))
    steps = echo.runner.timer.take_log()
    assert sum(step["counts"]["verified_nodes"] for step in steps) > 0
    assert all(step["seconds"]["output_layer"] >= DELAY for step in steps)
    others = {name for step in steps for name in step["seconds"]} - {"output_layer"}
    assert {"verify", "accept", "catch_up", "draft"} <= others
    for name in others:
        assert min(step["seconds"].get(name, 0.0) for step in steps) < DELAY
