# SPDX-License-Identifier: Apache-2.0
"""Where a cost curve comes from: the configuration, the store, a measurement at start-up."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.heard import heard
from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids, truths_of
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


def test_a_start_without_a_curve_measures_one_that_serves(plain: Engine, engine: Engine) -> None:
    """Catches an engine that stays idle for want of a curve, a measurement that no file could
    hold, and one that leaves rubbish in the KV cache that requests then read."""
    curve = engine.runner.pipeline.config.profile
    assert curve is not None
    assert CostCurve.from_dict(json.loads(json.dumps(curve.to_dict())), "profile") == curve
    assert curve.step[0][0] == 1
    assert len(curve.step) > 4
    assert curve.roots(1) > 0
    assert curve.control(4) > 0
    assert curve.layer(1) > curve.roots(1)
    prompts = random_prompts(4, seed=1)
    outputs = plain.generate(prompts, greedy())
    engine.follow(truths_of(outputs))
    assert token_ids(engine.generate(prompts, greedy())) == token_ids(outputs)
    # Where drafting does not pay on this machine, there are the candidates of the first trial.
    assert engine.record.accepted > 0


def test_the_head_is_timed_with_cold_weights(
    unsettled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in a loop the head lies in the caches, and costs less than half of what it does behind a
    target's forward: drafting would look cheaper than it is."""
    runs: list[str] = []
    names = {"_target": "target", "_roots": "head", "_head": "head", "_candidates": "head"}
    for name, kind in names.items():
        run = getattr(quick_profile, name)
        spy = lambda *args, run=run, kind=kind: (runs.append(kind), run(*args))[1]  # noqa: E731
        monkeypatch.setattr(quick_profile, name, spy)
    quick_profile.measure_in_worker(unsettled.runner)
    first = runs.index("head")
    # One call of the head that does not count, and from then on each behind the target.
    heads = [i for i in range(first, len(runs)) if runs[i] == "head"]
    behind = [i for i in heads if runs[i - 1] == "target"]
    assert len(heads) >= 3 * 2 * 2 * (1 + quick_profile.REPEATS)
    assert len(behind) >= len(heads) * quick_profile.REPEATS // (1 + quick_profile.REPEATS)


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        (QuickProfile(CURVE, 1.0), True),
        (QuickProfile(CURVE, 1.2), False),
        (QuickProfile(CURVE, 1.0, parts_disagreement=1.6), False),
        (QuickProfile(CURVE, 1.0, waited=0.4), False),
    ],
)
def test_a_measurement_is_kept_unless_the_machine_was_busy(
    unsettled: Engine,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: QuickProfile,
    kept: bool,
) -> None:
    """Passes that disagree; and a steady load, under which they agree on what is wrong."""
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: measured)
    with heard(quick_profile.logger.name, logging.WARNING) as lines:
        settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == CURVE
    assert profile_path(unsettled.runner.vllm_config).is_file() == kept
    assert list(store.glob("*.partial")) == []
    assert any("the machine is busy" in line for line in lines) == (not kept)
    assert quick_profile.logger.name.startswith("vllm."), "vLLM's set-up reaches nobody else"


SLOWER = replace(CURVE, step=tuple((rows, 3 * ms) for rows, ms in CURVE.step))
FLAT = replace(CURVE, step=((1, 20.0),))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose steps cost what ``CURVE`` says."""
    monkeypatch.setattr(quick_profile, "_target", lambda runner, rows: rows)
    monkeypatch.setattr(
        quick_profile, "times_ms", lambda call, *_: [CURVE.step_ms(call())] * quick_profile.REPEATS
    )


@pytest.mark.parametrize(("stored", "kept"), [(CURVE, True), (SLOWER, True), (FLAT, False)])
def test_a_stored_curve_is_taken_while_it_holds(
    unsettled: Engine,
    monkeypatch: pytest.MonkeyPatch,
    machine: None,
    stored: CostCurve,
    kept: bool,
) -> None:
    """A bad curve is not kept for ever. One of a slower time decides the same, and stays."""
    path = profile_path(unsettled.runner.vllm_config)
    path.write_text(json.dumps(stored.to_dict()))
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: QuickProfile(CURVE, 1.0))
    with heard(quick_profile.logger.name, logging.WARNING) as lines:
        settle_profile(unsettled.runner)
    taken = stored if kept else CURVE
    assert unsettled.runner.pipeline.config.profile == taken
    assert CostCurve.from_dict(json.loads(path.read_text()), "profile") == taken
    assert any("measuring anew" in line for line in lines) == (not kept)


def test_a_busy_machine_says_nothing_about_a_stored_curve(
    unsettled: Engine, monkeypatch: pytest.MonkeyPatch, machine: None
) -> None:
    """What was measured in a quiet hour is better than what is measured in a busy one."""
    path = profile_path(unsettled.runner.vllm_config)
    path.write_text(json.dumps(FLAT.to_dict()))
    count = iter(range(1000))
    monkeypatch.setattr(quick_profile, "times_ms", lambda *_: [1.2 ** next(count)] * 5)
    monkeypatch.setattr(quick_profile, "measure_in_worker", lambda _: pytest.fail("measured"))
    settle_profile(unsettled.runner)
    assert unsettled.runner.pipeline.config.profile == FLAT


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
