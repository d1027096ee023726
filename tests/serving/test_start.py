# SPDX-License-Identifier: Apache-2.0
"""What a start runs, and how the engine process waits."""

import time
from types import SimpleNamespace

import pytest

from tests.serving.harness import Engine
from vllm_echo.integration.cpu.executor import NAP_SECONDS, napping_wait


def test_a_warm_up_runs_the_head_once_and_verifies_nothing(
    echo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one run for each draft token, and a full batch sampled through the verifier."""
    runner, runs = echo.runner, []
    forward = runner.drafter.model.forward
    monkeypatch.setattr(
        runner.drafter.model, "forward", lambda *a, **k: (runs.append(1), forward(*a, **k))[1]
    )
    monkeypatch.setattr(runner.rejection_sampler, "forward", lambda *_: pytest.fail("verified"))
    assert runner.num_spec_tokens > 1
    runner.profile_run()
    assert len(runs) == 1


def test_a_wait_naps_where_it_would_spin_and_sleeps_as_vllm_does_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a wait for messages alone, which may be dropped: five seconds at a time."""
    naps: list[float] = []
    waits: list[int | None] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    condition = SimpleNamespace(last_read=time.monotonic(), busy_loop_s=60, wait=waits.append)
    nap = napping_wait(condition)
    nap(5000)
    assert (naps, waits) == ([NAP_SECONDS], [])
    condition.last_read -= 61
    nap(5000)
    assert (naps, waits) == ([NAP_SECONDS], [5000])
