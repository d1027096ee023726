# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, and a record of what a step really accepted.

Identity alone can be had by never drafting; so every identity test also asks the record
whether tokens were accepted, whether some came through a non-first sibling, and whether
accepted KV had to move."""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# An oracle's way into a worker of another process.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

from vllm import LLM, RequestOutput, SamplingParams

from tests.serving.oracle import OracleHead
from vllm_echo.integration.cpu.runner import EchoCPUModelRunner
from vllm_echo.integration.cpu.verifier import TreeVerifier

ENGINE_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 32,
    "seed": 0,
    "skip_tokenizer_init": True,
}


_LATEST: list["Engine"] = []
"""The engine that was built last: it must not be collected before the next one is built."""


@dataclass
class AcceptanceRecord:
    """What verification accepted since the record was cleared."""

    drafted: int = 0
    accepted: int = 0
    non_first_siblings: int = 0
    moved: int = 0
    largest_step: int = 0
    largest_tree: int = 0

    def clear(self) -> None:
        self.__init__()

    def require_tree_acceptance(self) -> None:
        """The path under test really ran."""
        assert self.accepted > 0, "nothing was accepted: this compares plain decoding with itself"
        assert self.non_first_siblings > 0, "no node was accepted through a non-first sibling"
        assert self.moved > 0, "no accepted KV ever had to move"

    def add_step(self, tree, paths) -> None:
        sizes = (tree.cu_rows.diff() - 1).tolist()
        self.drafted += sum(sizes)
        self.largest_step = max(self.largest_step, sum(sizes))
        self.largest_tree = max(self.largest_tree, *sizes)
        for start, rows, accepted in zip(
            tree.cu_rows.tolist(), paths.rows.tolist(), paths.num_accepted.tolist(), strict=False
        ):
            self.accepted += accepted
            for place, row in enumerate(rows[:accepted], start=1):
                siblings = tree.parents[start : start + row]
                self.non_first_siblings += int((siblings == tree.parents[start + row]).any())
                self.moved += row != place


@dataclass
class Engine:
    """An LLM in this process."""

    llm: LLM
    record: AcceptanceRecord = field(default_factory=AcceptanceRecord)

    @property
    def runner(self) -> EchoCPUModelRunner:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def generate_in_batches(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], batch: int
    ) -> list[RequestOutput]:
        outputs = []
        for first in range(0, len(prompts), batch):
            outputs += self.generate(
                prompts[first : first + batch], list(params[first : first + batch])
            )
        return outputs

    def step_through(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        after_step: Callable[[], None] = lambda: None,
        arrivals: int = 1000,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` step by step: so many ``arrivals`` before each, a call of ``after_step``
        behind it."""
        engine, finished, arrived = self.llm.llm_engine, {}, 0
        while len(finished) < len(prompts):
            for index in range(arrived, min(arrived + arrivals, len(prompts))):
                prompt = {"prompt_token_ids": list(prompts[index])}
                priority = priorities[index] if priorities else 0
                engine.add_request(str(index), prompt, params[index], priority=priority)
            arrived += arrivals
            finished |= {o.request_id: o for o in engine.step() if o.finished}
            after_step()
        return [finished[str(index)] for index in range(len(prompts))]

    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def follow(
        self, truths: dict[tuple[int, ...], list[int]], hit_rate: float = 0.8, seed: int = 0
    ) -> None:
        """Replace the head by an oracle that knows ``truths``: prompt -> output tokens."""
        follow(self.runner, truths, hit_rate, seed)

    def watch(self) -> AcceptanceRecord:
        """Record every step's acceptance from now on."""
        watch(self.runner.rejection_sampler, self.record)
        return self.record


def watch(verifier: TreeVerifier, record: AcceptanceRecord) -> None:
    """``Engine.watch`` where the verifier is."""
    plain_forward = type(verifier).forward

    def forward(*args, **kwargs):
        step = verifier._step
        output = plain_forward(verifier, *args, **kwargs)
        if step is not None:
            record.add_step(step.tree, verifier.paths)
        return output

    verifier.forward = forward


def follow(
    runner: EchoCPUModelRunner,
    truths: dict[tuple[int, ...], list[int]],
    hit_rate: float,
    seed: int = 0,
) -> None:
    """``Engine.follow`` where the runner is."""
    gen = torch.Generator().manual_seed(seed)

    def draft_head(requests, for_logits, for_feedback, roots):
        states = [runner.requests[runner.input_batch.req_ids[i]] for i in requests.tolist()]
        known = [
            truths.get(tuple(state.prompt_token_ids), [])[len(state.output_token_ids) :]
            for state in states
        ]
        return OracleHead(known, runner.input_batch.vocab_size, hit_rate, gen)

    runner._draft_head = draft_head


def plain_engine(target: Path, **options) -> Engine:
    """Decoding without speculation."""
    # An engine that is collected takes the process's parallel groups along, and the next one makes
    # them anew, for all that are left: so it happens here and nowhere else.
    _LATEST.clear()
    gc.collect()
    engine = Engine(LLM(model=str(target), **{**ENGINE_DEFAULTS, **options}))
    _LATEST.append(engine)
    return engine


def speculative_config(head: Path, num_nodes: int, echo: dict | None) -> dict:
    return {
        "method": "echo",
        "model": str(head),
        "num_speculative_tokens": num_nodes,
        "echo": {"policy": "echo", "k_max": 32, **(echo or {})},
    }


def echo_engine(
    target: Path,
    head: Path,
    num_nodes: int = 8,
    echo: dict | None = None,
    speculative: dict | None = None,
    **options,
) -> Engine:
    """Decoding with echo, watched; ``speculative`` are more keys beside ``echo``. Unless ``echo``
    says otherwise the budget is a constant, so that no decision depends on the machine."""
    config = {**speculative_config(head, num_nodes, echo), **(speculative or {})}
    engine = plain_engine(target, speculative_config=config, **options)
    engine.watch()
    return engine


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """[request][sample] token ids."""
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def truths_of(outputs: Sequence[RequestOutput]) -> dict[tuple[int, ...], list[int]]:
    """What the oracle needs: prompt -> tokens of its first sample."""
    return {tuple(o.prompt_token_ids): list(o.outputs[0].token_ids) for o in outputs}


def random_prompts(
    count: int, seed: int = 0, shortest: int = 3, longest: int = 120
) -> list[list[int]]:
    """Prompts of different lengths from a tiny vocabulary's ordinary tokens."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=gen).tolist()
    return [torch.randint(3, 384, (length,), generator=gen).tolist() for length in lengths]


def repeat(make: Callable[[int], SamplingParams], count: int) -> list[SamplingParams]:
    return [make(i) for i in range(count)]
