# SPDX-License-Identifier: Apache-2.0
"""A cost curve that is wrong, in an engine that serves: it is found out by the steps themselves."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.heard import heard
from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids, truths_of
from vllm_echo.core.cost import StepLoad
from vllm_echo.integration.cpu import runner as runner_module

REQUESTS = 4
PROMPTS = random_prompts(REQUESTS, seed=3, longest=40)
DEAR: dict[str, Any] = {
    "step": [[1, 10.0], [2, 500.0], [4, 1000.0], [64, 60_000.0]],
    "roots": [50.0, 0.0],
    "layer": [50.0, 0.0],
    "catch_up": [0.1, 0.0],
    "control": [0.1, 0.0],
}
"""Of a machine on which nothing could ever pay."""


@pytest.fixture(scope="module")
def engine(target: Path, head: Path) -> Engine:
    options = {"policy": "goodput", "k_max": "auto", "profile": DEAR}
    return echo_engine(target, head, 6, options, enable_prefix_caching=False, max_num_seqs=8)


@pytest.fixture(autouse=True)
def _as_started(engine: Engine) -> Iterator[None]:
    yield
    engine.runner.set_options({"watch_costs": True})
    engine.record.clear()


def params_of(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def serve(engine: Engine, tokens: int = 200) -> tuple[list[list[list[int]]], list[str]]:
    """The answers, and what the log said."""
    with heard(runner_module.logger.name, logging.WARNING) as lines:
        outputs = engine.generate(PROMPTS, params_of(tokens))
    return token_ids(outputs), [line for line in lines if "depart from the cost curve" in line]


def price_of_drafts(engine: Engine) -> float:
    """Of a step with eight candidates and a layer, in plain steps, as this load is decided now."""
    watch, load = engine.runner.pipeline.watch, StepLoad(REQUESTS, 0, 100 * REQUESTS)
    assert watch is not None
    curve = watch.curve(load)
    drafting = curve.roots(REQUESTS) + curve.layer(REQUESTS)
    return (curve.nodes_ms(load, 8) + drafting) / curve.plain_ms(load)


def test_a_curve_that_is_too_dear_is_found_out_by_the_steps(plain: Engine, engine: Engine) -> None:
    """Nothing would ever be drafted, and nothing be learnt. Catches a runner that feeds no times,
    or the wrong ones: the whole way from the hooks to the offers."""
    engine.runner.set_options({"watch_costs": True})
    before = price_of_drafts(engine)
    outputs = plain.generate(PROMPTS, params_of(200))
    engine.follow(truths_of(outputs))
    answers, told = serve(engine)
    assert len(told) == 1
    assert "at about 4 requests" in told[0]
    assert price_of_drafts(engine) < before / 3
    assert answers == token_ids(outputs), "it decides how fast, never what"
    assert engine.record.accepted > REQUESTS


def test_a_fixed_curve_is_left_alone(engine: Engine) -> None:
    engine.runner.set_options({"watch_costs": False})
    assert serve(engine, tokens=100)[1] == []
    assert engine.record.drafted == 0


def test_recording_is_not_watched(engine: Engine) -> None:
    """It drafts for everybody and verifies nothing: no plain steps, and no others."""
    runner = engine.runner
    runner.set_options({"watch_costs": True, "top_k": 2})  # not served before
    runner.start_recording()
    serve(engine, tokens=20)
    runner.take_recording()
    assert runner.pipeline.watch is not None
    assert not runner.pipeline.watch._loads
    runner.stop_recording()
