# SPDX-License-Identifier: Apache-2.0
"""Where a cost curve comes from: the configuration, the store, a measurement at start-up."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.heard import heard
from tests.serving.harness import Engine, echo_engine, random_prompts
from tests.serving.test_identity import greedy
from tests.serving.test_running_options import PROFILE
from vllm_echo.core.cost import CostCurve
from vllm_echo.integration.cpu import quick_profile
from vllm_echo.integration.cpu.quick_profile import QuickProfile, settle_profile
from vllm_echo.integration.profile_store import profile_path

CURVE = CostCurve.from_dict(PROFILE, "profile")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ECHO_CACHE", str(folder))
        yield folder / "profiles"


@pytest.fixture(scope="module")
def engine(target: Path, head: Path, store: Path) -> Engine:
    """Started without a curve anywhere."""
    return echo_engine(target, head, 4, {"k_max": "auto", "policy": "goodput"})


@pytest.fixture
def unsettled(engine: Engine, store: Path) -> Engine:
    """As before the first request, and nothing stored."""
    for file in store.glob("*"):
        file.unlink()
    pipeline = engine.runner.pipeline
    pipeline.set_options(replace(pipeline.config, profile=None))
    return engine


def test_the_targets_time_is_the_targets(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's warm-up run of a target goes on to the head, once for each draft token: catches a
    step that looks longer, and drafting that looks cheaper, the more tokens are drafted."""
    runner = engine.runner
    runs: list[int] = []
    forward = runner.model.forward
    monkeypatch.setattr(
        runner.model, "forward", lambda *a, **k: (runs.append(1), forward(*a, **k))[1]
    )
    monkeypatch.setattr(runner.drafter, "_forward", lambda *_: pytest.fail("ran the head"))
    monkeypatch.setattr(runner.drafter.model, "forward", lambda *_, **__: pytest.fail("ran it"))
    quick_profile._target(runner, 4)
    assert runs


def test_a_start_without_a_curve_measures_one_that_serves(engine: Engine) -> None:
    """Catches an engine that stays idle for want of a curve, a measurement that no file could
    hold, and one that leaves rubbish in the KV cache that requests then read."""
    curve = engine.runner.pipeline.config.profile
    assert curve is not None
    assert CostCurve.from_dict(json.loads(json.dumps(curve.to_dict())), "profile") == curve
    assert curve.step[0][0] == 1
    assert len(curve.step) > 4
    assert curve.roots(1) > 0
    assert curve.layer(1) > curve.roots(1)
    prompts = random_prompts(4, seed=1)
    first = [out.outputs[0].token_ids for out in engine.generate(prompts, greedy())]
    engine.runner.set_options({"k_max": 0})
    again = [out.outputs[0].token_ids for out in engine.generate(prompts, greedy())]
    engine.runner.set_options({"k_max": "auto"})
    assert first == again


@pytest.mark.parametrize(("noise", "kept"), [(1.0, True), (2.0, False)])
def test_a_measurement_is_kept_unless_the_machine_was_busy(
    unsettled: Engine,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    noise: float,
    kept: bool,
) -> None:
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: QuickProfile(CURVE, noise))
    with heard(quick_profile.logger.name, logging.WARNING) as lines:
        settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == CURVE
    assert profile_path(unsettled.runner.vllm_config).is_file() == kept
    assert list(store.glob("*.partial")) == []
    assert any("the machine is busy" in line for line in lines) == (not kept)
    assert quick_profile.logger.name.startswith("vllm."), "vLLM's set-up reaches nobody else"


def test_a_stored_curve_is_taken_and_nothing_is_measured(
    unsettled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile_path(unsettled.runner.vllm_config)
    path.write_text(json.dumps(CURVE.to_dict()))
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: pytest.fail("measured"))
    settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == CURVE


@pytest.mark.parametrize("content", ["", "{}", '{"step": []}', "null"])
def test_a_stored_curve_that_cannot_be_read_is_measured_again(
    unsettled: Engine, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = profile_path(unsettled.runner.vllm_config)
    path.write_text(content)
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: QuickProfile(CURVE, 1.0))
    settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == CURVE
    assert CostCurve.from_dict(json.loads(path.read_text()), "profile") == CURVE


def test_a_curve_in_the_configuration_wins(
    unsettled: Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsettled.runner.set_options({"profile": PROFILE})
    monkeypatch.setattr(quick_profile, "load_profile", lambda _: pytest.fail("looked it up"))
    settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == CURVE
    assert list(store.glob("*")) == []
