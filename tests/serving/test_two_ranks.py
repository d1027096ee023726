# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks decide alike, and emit what one rank emits without speculation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.serving.harness import (
    ENGINE_DEFAULTS,
    Engine,
    random_prompts,
    token_ids,
    truths_of,
)
from tests.serving.oracle import OracleHead
from tests.serving.scrape import scrape
from tests.serving.test_identity import greedy, seeded
from tests.serving.test_running_options import PROFILE

pytestmark = pytest.mark.timeout(300)
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def ranks(target: Path, head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Two processes, started without a cost curve anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ECHO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        speculative = {"method": "echo", "model": str(head), "num_speculative_tokens": 8}
        llm = LLM(
            str(target),
            speculative_config=speculative | {"echo": {"policy": "goodput"}},
            tensor_parallel_size=2,
            disable_log_stats=False,
            **ENGINE_DEFAULTS,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


def both(llm: LLM, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(worker, *args)`` of each rank: it crosses to their processes by name."""
    first, second = llm.collective_rpc(function, args=args)
    return [first, second]


def follow(worker: Any, truths: dict[tuple[int, ...], list[int]]) -> None:
    """As ``Engine.follow``, in a worker: the same guesses on both ranks."""
    runner, gen = worker.model_runner, torch.Generator().manual_seed(0)

    def draft_head(requests: torch.Tensor, *_: torch.Tensor) -> OracleHead:
        states = [runner.requests[runner.input_batch.req_ids[i]] for i in requests.tolist()]
        known = [
            truths.get(tuple(state.prompt_token_ids), [])[len(state.output_token_ids) :]
            for state in states
        ]
        return OracleHead(known, runner.input_batch.vocab_size, 0.8, gen)

    runner._draft_head = draft_head


def curve_of(worker: Any) -> dict[str, Any]:
    return worker.model_runner.pipeline.config.profile.to_dict()


def rank_of(worker: Any) -> int:
    return worker.rank


def test_the_curve_measured_at_start_up_is_rank_0s_on_both(ranks: LLM) -> None:
    """Each rank has its own clock: catches curves of their own, by which they would draft
    different trees and wait for each other for ever."""
    assert both(ranks, rank_of) == [0, 1]
    first, second = both(ranks, curve_of)
    assert first == second
    assert len(first["step"]) > 4


GIVEN: list[dict[str, Any]] = [
    {},  # as measured at start-up
    {"profile": PROFILE, "watch_costs": False},
    {"policy": "echo", "k_max": "auto"},
    {"policy": "echo", "k_max": 32, "gates": []},
]


@pytest.mark.parametrize("options", GIVEN, ids=["measured", "given", "echo-auto", "echo-32"])
def test_two_ranks_emit_the_tokens_of_one_without_speculation(
    plain: Engine, ranks: LLM, options: dict[str, Any]
) -> None:
    prompts = random_prompts(NUM_REQUESTS, seed=61)
    params: list[SamplingParams] = [greedy() if i % 2 else seeded(i) for i in range(NUM_REQUESTS)]
    outputs = plain.generate(prompts, params)
    both(ranks, follow, truths_of(outputs))
    if options:
        ranks.collective_rpc("set_echo_options", args=(options,))
    before = scrape()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    actual = ranks.generate(inputs, params, use_tqdm=False)
    assert token_ids(actual) == token_ids(outputs)
    after = scrape()
    accepted = sum(after.nodes("accepted").values()) - sum(before.nodes("accepted").values())
    # By the curve that was measured the machine of the moment decides whether drafting pays: there
    # are the candidates of the first trial at least.
    assert accepted > (NUM_REQUESTS if options else 0), "this compares plain decoding with itself"
