# SPDX-License-Identifier: Apache-2.0
"""Identity through whatever the engine does to a request: prefill in chunks, prefix cache
hits, preemption, the context limit, neighbours that come and go."""

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.serving.harness import (
    ENGINE_DEFAULTS,
    Engine,
    echo_engine,
    plain_engine,
    random_prompts,
    token_ids,
    truths_of,
)
from tests.serving.test_identity import expect_identity, greedy, seeded


def greedy_and_seeded(count: int) -> list[SamplingParams]:
    return [greedy() if i % 2 else seeded(i) for i in range(count)]


def test_prefill_in_chunks(plain: Engine, target: Path, head: Path) -> None:
    """Prompts of several chunks decode beside trees; a seeded request whose sample is
    discarded after a chunk must not advance its stream (stock vLLM dies of it here)."""
    chunked = echo_engine(target, head, max_num_batched_tokens=48, max_num_seqs=8)
    prompts = random_prompts(40, seed=3, shortest=10, longest=300)
    expect_identity(plain, chunked, greedy_and_seeded(40), prompts=prompts)
    # The server goes on answering.
    expect_identity(plain, chunked, greedy_and_seeded(8), prompts=random_prompts(8, seed=9))


def test_prefix_cache_hits_decode_the_same(target: Path, head: Path) -> None:
    """KV that compaction left in a wrong place would be served to the next request."""
    plain = plain_engine(target, enable_prefix_caching=True)
    echo = echo_engine(target, head, enable_prefix_caching=True)
    stem = random_prompts(1, seed=11, shortest=100, longest=100)[0]
    prompts = [stem + tail for tail in random_prompts(30, seed=12, shortest=2, longest=20)]
    expected, _ = expect_identity(plain, echo, [greedy()] * 30, prompts=prompts)
    # Second turn: history is prompt + what was generated, so its blocks hold decoded KV.
    turns = [
        list(o.prompt_token_ids) + list(o.outputs[0].token_ids) + tail
        for o, tail in zip(
            expected, random_prompts(30, seed=13, shortest=2, longest=9), strict=True
        )
    ]
    turns = [turn + turn[-60:] for turn in turns]
    expected, actual = expect_identity(plain, echo, greedy_and_seeded(30), prompts=turns)
    assert sum(o.num_cached_tokens for o in actual) > 0
    for a, b in zip(actual, expected, strict=True):
        # vLLM gives up an EAGLE drafter's last cached block: it needs its hidden states.
        assert a.num_cached_tokens >= b.num_cached_tokens - ENGINE_DEFAULTS["block_size"]


def test_preemption_with_trees_in_flight(plain: Engine, target: Path, head: Path) -> None:
    """A KV cache too small for its requests: some are thrown out and computed again."""
    small = echo_engine(
        target, head, kv_cache_memory_bytes=1536 << 10, max_num_seqs=16, max_model_len=256
    )
    prompts = random_prompts(24, seed=4, shortest=20, longest=90)
    params = [greedy() if i % 2 else seeded(i) for i in range(24)]
    for one in params:
        one.max_tokens = 90
    preempted = count_preemptions(small)
    free = small.num_free_blocks()
    expect_identity(plain, small, params, prompts=prompts)
    assert preempted() > 0, "nothing was preempted"
    assert small.num_free_blocks() == free


def count_preemptions(engine: Engine):
    scheduler, original, calls = engine.scheduler, engine.scheduler._preempt_request, []

    def preempt(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    scheduler._preempt_request = preempt
    return lambda: len(calls)


@pytest.mark.parametrize("left", [1, 2, 3, 4, 7, 12, 20])
def test_the_context_limit_cuts_trees_not_tokens(target: Path, head: Path, left: int) -> None:
    """Prompts that end ``left`` tokens before max_model_len, beside one with room."""
    plain = plain_engine(target, max_model_len=160)
    echo = echo_engine(target, head, max_model_len=160)
    prompts = random_prompts(6, seed=left, shortest=160 - left, longest=160 - left)
    prompts += random_prompts(2, seed=left, shortest=40, longest=60)
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True) for _ in prompts]
    expected, _ = expect_identity(plain, echo, params, prompts=prompts)
    assert [len(o.outputs[0].token_ids) for o in expected[:6]] == [left] * 6


def test_requests_join_and_abort_in_the_middle(plain: Engine, echo: Engine) -> None:
    """Those that stay are not disturbed, and blocks come back."""
    prompts = random_prompts(30, seed=21)
    params = [greedy() if i % 2 else seeded(i) for i in range(30)]
    expected = plain.generate(prompts, params)
    echo.follow(truths_of(expected))
    echo.record.clear()
    free = echo.num_free_blocks()
    finished: dict[str, list[int]] = {}
    engine, aborted, step = echo.llm.llm_engine, set(), 0
    waiting = list(range(30))
    while waiting or engine.has_unfinished_requests():
        for index in [waiting.pop(0) for _ in range(min(3, len(waiting)))]:
            engine.add_request(f"r{index}", {"prompt_token_ids": prompts[index]}, params[index])
        if step in (2, 4, 6, 8):
            aborted.add(f"r{step}")
            engine.abort_request([f"r{step}"])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    for index, output in enumerate(expected):
        if f"r{index}" not in aborted:
            assert finished[f"r{index}"] == list(output.outputs[0].token_ids), f"request {index}"
    echo.record.require_tree_acceptance()
    assert echo.num_free_blocks() == free


def test_ragged_batches_of_every_size(plain: Engine, echo: Engine) -> None:
    """Batch sizes 1 to 17, lengths all different: padded or neighbouring rows stay inert."""
    prompts = random_prompts(17, seed=31)
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(17)
    ]
    expected = plain.generate(prompts, params)
    echo.follow(truths_of(expected))
    echo.record.clear()
    for size in range(1, 18):
        assert token_ids(echo.generate(prompts[:size], params[:size])) == token_ids(expected[:size])
    echo.record.require_tree_acceptance()
