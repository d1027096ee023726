# SPDX-License-Identifier: Apache-2.0
"""Identity where vLLM's scheduler takes something away: blocks in the middle of a step, the
look-ahead, everybody's cache at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.serving.harness import (
    Engine,
    echo_engine,
    plain_engine,
    random_prompts,
    token_ids,
    truths_of,
)
from tests.serving.test_identity import assert_equal_logprobs, greedy, seeded

BLOCK_BYTES = 5 * 2 * 2 * 32 * 4 * 32
"""Four layers and the head's, keys and values, two heads of 32 numbers, fp32, 32 positions."""


def pool_of(num_blocks: int) -> dict[str, int]:
    """The pool's first block belongs to nobody."""
    return {"kv_cache_memory_bytes": (num_blocks + 1) * BLOCK_BYTES}


def greedy_and_seeded(count: int, num_tokens: int = 40) -> list[SamplingParams]:
    params = [greedy() if i % 2 else seeded(i) for i in range(count)]
    for one in params:
        one.max_tokens = num_tokens
    return params


def expect_same(
    plain: Engine, echo: Engine, prompts: list, params: list, run: Callable[[], list]
) -> None:
    """``run`` gives what plain decoding gives, accepts trees, and all blocks come back."""
    expected = plain.generate(prompts, params)
    echo.follow(truths_of(expected))
    echo.record.clear()
    free = echo.num_free_blocks()
    actual = run()
    assert token_ids(actual) == token_ids(expected)
    for a, b in zip(actual, expected, strict=True):
        if b.outputs[0].logprobs is not None:
            assert_equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)
    echo.record.require_tree_acceptance()
    assert echo.num_free_blocks() == free


def preempted_in_the_step_that_scheduled_them(engine: Engine) -> list[str]:
    """Grows by every request that had been given its blocks in the very step that took them."""
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    begin, allocate = manager.new_step_starts, manager.allocate_slots
    preempt = scheduler._preempt_request
    given: set[str] = set()
    taken: list[str] = []

    def new_step_starts():
        given.clear()
        return begin()

    def allocate_slots(request, *args, **kwargs):
        blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            given.add(request.request_id)
        return blocks

    def preempt_request(request, *args, **kwargs):
        if request.request_id in given:
            taken.append(request.request_id)
        return preempt(request, *args, **kwargs)

    manager.new_step_starts, manager.allocate_slots = new_step_starts, allocate_slots
    scheduler._preempt_request = preempt_request
    return taken


def test_priorities_take_back_what_the_step_has_given(
    plain: Engine, target: Path, head: Path
) -> None:
    """Who came first counts least, so a step takes blocks and drafts from a request that it has
    scheduled. Catches a tree that is packed for a request that is not there."""
    limits = {"max_num_seqs": 16, "max_model_len": 256, "scheduling_policy": "priority"}
    echo = echo_engine(target, head, **limits, **pool_of(24))
    taken = preempted_in_the_step_that_scheduled_them(echo)
    prompts, params = random_prompts(24, seed=91, shortest=20, longest=90), greedy_and_seeded(24)
    expect_same(
        plain,
        echo,
        prompts,
        params,
        lambda: echo.step_through(prompts, params, arrivals=3, priorities=range(24, 0, -1)),
    )
    assert taken, "nobody was preempted by the step that had scheduled him"


@pytest.mark.parametrize("num_nodes", [8, 64, 255])
def test_a_pool_that_holds_a_request_but_not_its_look_ahead(
    plain: Engine, target: Path, head: Path, num_nodes: int
) -> None:
    """A request reserves as many positions ahead as it may have nodes, and the pool holds one
    whole context. Catches a server that stands still there, or drafts no more."""
    deep = {"max_depth": 8, "target_depth": 8, "top_k": 16}
    shape = {"k_max": 4 * num_nodes, "gates": [], **deep}
    echo = echo_engine(target, head, num_nodes, shape, max_num_batched_tokens=2048, **pool_of(16))
    manager, refused = echo.scheduler.kv_cache_manager, []
    allocate = manager.allocate_slots

    def allocate_slots(request, *args, **kwargs):
        blocks = allocate(request, *args, **kwargs)
        if blocks is None:
            refused.append(request.num_tokens)
        return blocks

    manager.allocate_slots = allocate_slots
    prompts, params = random_prompts(8, seed=92, shortest=20, longest=180), greedy_and_seeded(8)
    expect_same(plain, echo, prompts, params, lambda: echo.generate(prompts, params))
    assert refused, "there was room for everybody"
    assert echo.record.largest_tree == num_nodes


def test_preempted_at_the_context_limit_and_resumed(target: Path, head: Path) -> None:
    """All lose their blocks again and again, at each of their last positions among others. Catches
    trees that outlive it, and a prompt computed anew that reaches beyond the context."""
    limits = {"max_model_len": 160, "enable_prefix_caching": True}
    plain, echo = plain_engine(target, **limits), echo_engine(target, head, **limits)
    prompts = [random_prompts(1, n, shortest=n, longest=n)[0] for n in range(130, 146)]
    params = greedy_and_seeded(16, num_tokens=100)
    found: set[int] = set()

    def throw_out() -> None:
        running = echo.scheduler.running
        near_the_end = [request.num_tokens for request in running if request.num_tokens >= 150]
        if near_the_end:
            found.update(near_the_end)
            echo.llm.reset_prefix_cache(reset_running_requests=True)

    expect_same(plain, echo, prompts, params, lambda: echo.step_through(prompts, params, throw_out))
    assert found >= set(range(150, 160)), found


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_changes_no_stream(plain: Engine, echo: Engine, clear_cache: bool) -> None:
    """Requests stand still with trees in flight, keep their caches or lose them, and go on."""
    prompts = random_prompts(16, seed=94)
    params = [
        greedy(logprobs=2) if i % 3 == 0 else seeded(i, logprobs=i % 2 or None) for i in range(16)
    ]
    core = echo.llm.llm_engine.engine_core.engine_core
    steps = paused = 0

    def pause_now_and_then() -> None:
        nonlocal steps, paused
        steps += 1
        if steps % 3:
            return
        core.pause_scheduler("keep", clear_cache)
        in_flight = sum(len(request.spec_token_ids) for request in core.scheduler.running)
        before = echo.record.drafted
        assert all(not echo.llm.llm_engine.step() for _ in range(2))
        assert echo.record.drafted == before
        core.resume_scheduler()
        paused += bool(in_flight) or clear_cache

    expect_same(
        plain, echo, prompts, params, lambda: echo.step_through(prompts, params, pause_now_and_then)
    )
    assert paused > 1
