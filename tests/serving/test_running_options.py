# SPDX-License-Identifier: Apache-2.0
"""What changes while an engine runs: the budget, the policy, a trace that is recorded, and the
draft KV of rows that nobody drafts from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.core.steps import GATED
from tests.serving.harness import Engine, echo_engine, random_prompts, token_ids, truths_of
from tests.serving.test_identity import greedy
from vllm_echo.core.trace import UNKNOWN, DraftTrace
from vllm_echo.errors import EchoConfigError

NUM_TOKENS = 24
PROFILE = {
    "step": [[1, 10.0], [8, 12.0], [64, 40.0]],
    "roots": [0.5, 0.0],
    "layer": [0.5, 0.0],
    "catch_up": [0.5, 0.0],
    "control": [0.2, 0.0],
}


@pytest.fixture(scope="module")
def engine(target: Path, head: Path) -> Engine:
    return echo_engine(
        target, head, 8, {"k_max": 64, "gates": []}, enable_prefix_caching=False, max_num_seqs=8
    )


@pytest.fixture(autouse=True)
def _as_started(engine: Engine) -> Iterator[None]:
    yield
    engine.runner.set_options({"policy": "echo", "k_max": 64, "gates": [], "profile": None})
    engine.runner.__dict__.pop("_draft_head", None)
    engine.record.clear()


def record_trace(engine: Engine, prompts: list[list[int]], idle_steps: int) -> DraftTrace:
    """Decode ``idle_steps`` with a budget of 0, then record the rest."""
    core = engine.llm.llm_engine
    engine.runner.set_options({"k_max": 0})
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        core.add_request(str(index), {"prompt_token_ids": prompt}, params)
    for _ in range(idle_steps):
        core.step()
    engine.runner.start_recording()
    while core.has_unfinished_requests():
        core.step()
    content = engine.runner.take_recording()
    engine.runner.stop_recording()
    return DraftTrace.from_bytes(content)


@pytest.mark.parametrize("idle_steps", [0, 12])
def test_draft_kv_without_the_rest_of_the_head_is_that_of_the_whole_head(
    engine: Engine, idle_steps: int
) -> None:
    """Rows of prompts, and of steps without a budget, get key and value only. A head that drafts
    over them later must see what a full catch-up would have written."""
    prompts = [list(p) for p in random_prompts(4, 3, shortest=40, longest=90)]
    writer = engine.runner.drafter.kv_writer
    assert writer is not None
    with torch.inference_mode():
        writer.flush()  # the last rows of requests that have ended
    written: list[int] = []
    write = writer._write
    writer._write = lambda *args: (written.append(args[0].shape[0]), write(*args))[1]
    lean = record_trace(engine, prompts, idle_steps)
    del writer._write
    engine.runner.drafter.kv_writer = None
    whole = record_trace(engine, prompts, idle_steps)
    engine.runner.drafter.kv_writer = writer
    # Plain steps write nothing; the first step that drafts writes all but its roots at once.
    assert written == [sum(map(len, prompts)) + len(prompts) * (idle_steps - 1)]
    assert np.array_equal(lean.tokens, whole.tokens)
    assert np.array_equal(lean.root_tokens, whole.root_tokens)
    assert np.isfinite(lean.log_probs).sum() > 100
    # fp32; the two differ in the order of sums only.
    np.testing.assert_allclose(lean.log_probs, whole.log_probs, atol=1e-4)


def test_a_trace_holds_every_output_position_and_the_tokens_that_came(
    engine: Engine, plain: Engine
) -> None:
    """Recording verifies nothing, and the roots in order are plain decoding's output."""
    prompts = [list(p) for p in random_prompts(4, seed=5)]
    params = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)] * 4
    expected = [sample for (sample,) in token_ids(plain.generate(prompts, params))]
    engine.record.clear()
    trace = record_trace(engine, prompts, 0)
    assert engine.record.drafted == 0
    assert trace.num_requests == 4
    for request, tokens in enumerate(expected):
        rows = trace.requests == request
        assert trace.root_tokens[rows].tolist() == tokens
        assert trace.positions[rows].tolist() == list(range(1, NUM_TOKENS + 1))
        truth = trace.continuations()[rows]
        assert truth[0, : trace.max_depth].tolist() == tokens[1 : trace.max_depth + 1]
        assert (truth[-1] == UNKNOWN).all()


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "goodput", "k_max": "auto", "profile": PROFILE},
        {"policy": "echo", "k_max": "auto", "profile": PROFILE},
        {"policy": "dense", "k_max": 16},
        {"policy": "fixed-threshold", "k_max": 16, "threshold": 0.0},
        {"policy": "ddd", "k_max": 24, "threshold": 0.0},
        {"policy": "static", "k_max": 24},
        {"policy": "echo", "k_max": 16, "transfer": False},
        {"policy": "echo", "k_max": 16, "width": False},
    ],
    ids=lambda o: "-".join(f"{v}" for k, v in o.items() if k != "profile"),
)
def test_every_policy_gives_plain_decodings_output(
    engine: Engine, plain: Engine, options: dict
) -> None:
    prompts = random_prompts(8, seed=7)
    params = [greedy()] * 8
    outputs = plain.generate(prompts, params)
    engine.follow(truths_of(outputs))
    engine.runner.set_options(options)
    with operators_that_run() as ran:
        assert token_ids(engine.generate(prompts, params)) == token_ids(outputs)
    assert engine.record.accepted > 0
    assert ran >= {"append_layer", "next_frontier", "order_trees", "admit_nodes"}
    assert ran >= {"read_trees", "pack_trees", "tree_attention", "accept_greedy", "commit_kv"}
    assert ("grant_layer" in ran) is (options["policy"] in GATED)
    assert (ran >= {"score_children", "expect_gain", "fastest_size"}) is (
        options["policy"] == "goodput"
    )


@contextmanager
def operators_that_run() -> Iterator[set[str]]:
    """Names of the compiled operators, as PyTorch's dispatcher sees them called."""
    ran: set[str] = set()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield ran
    prefix = "vllm_echo::"
    names = {event.name for event in profile.events()}
    ran |= {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_without_a_budget_nothing_is_drafted_and_the_output_is_plain_decodings(
    engine: Engine, plain: Engine
) -> None:
    prompts = random_prompts(8, seed=9)
    outputs = plain.generate(prompts, [greedy()] * 8)
    engine.follow(truths_of(outputs))
    engine.runner.set_options({"k_max": 0})
    assert token_ids(engine.generate(prompts, [greedy()] * 8)) == token_ids(outputs)
    assert engine.record.drafted == 0


def test_a_budget_that_comes_and_goes_from_step_to_step_changes_no_token(
    engine: Engine, plain: Engine
) -> None:
    """Catches draft KV or trees that a step without a budget leaves behind."""
    prompts = random_prompts(8, seed=11)
    outputs = plain.generate(prompts, [greedy()] * 8)
    engine.follow(truths_of(outputs))
    steps = 0
    plan = engine.runner.pipeline.policy.offer

    def offer(load, num_sampled=0):
        nonlocal steps
        steps += 1
        return plan(load, num_sampled) if steps % 3 else type(plan(load))(0)

    engine.runner.pipeline.policy.offer = offer
    assert token_ids(engine.generate(prompts, [greedy()] * 8)) == token_ids(outputs)
    assert engine.record.accepted > 0 and steps > 6


def test_options_that_the_engine_has_no_room_for_are_refused(engine: Engine) -> None:
    with pytest.raises(EchoConfigError, match="9 is more than the 8"):
        engine.runner.set_options({"num_speculative_tokens": 9, "max_depth": 6})
    assert engine.runner.pipeline.config.num_speculative_tokens == 8


@pytest.mark.parametrize("options", [{"k_max": "auto"}, {"policy": "goodput"}])
def test_options_that_need_a_curve_where_there_is_none_are_refused(
    engine: Engine, options: dict
) -> None:
    """Catches an engine that stops to draft and does not say so."""
    before = engine.runner.pipeline.config
    with pytest.raises(EchoConfigError, match="echo.profile: is missing"):
        engine.runner.set_options(options)
    assert engine.runner.pipeline.config == before


def test_options_do_not_change_under_a_recording(engine: Engine) -> None:
    """What is drafted then is not to be verified, and its trees have the recording's shape."""
    engine.runner.start_recording()
    with pytest.raises(EchoConfigError, match="stop the recording first"):
        engine.runner.set_options({"k_max": 3})
    engine.runner.stop_recording()
    assert engine.runner.set_options({"k_max": 3})["k_max"] == 3


def test_a_request_that_ignores_the_end_drafts_beyond_it(engine: Engine, plain: Engine) -> None:
    """Catches a plan that takes each of its end tokens for its last one."""
    prompts = random_prompts(4, seed=13)
    params = [greedy(logit_bias={2: 100.0})] * 4
    outputs = plain.generate(prompts, params)
    assert all(set(output.outputs[0].token_ids) == {2} for output in outputs)
    engine.follow(truths_of(outputs))
    assert token_ids(engine.generate(prompts, params)) == token_ids(outputs)
    assert engine.record.accepted > 0
