# SPDX-License-Identifier: Apache-2.0
"""A recorded trace of a toy pair, and a toy cost curve, for the simulator's tests."""

import numpy as np
import torch

from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import CostCurve, Line, StepLoad
from vllm_echo.core.draft import DraftBatch, DraftHead, Frontier
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.policies import make_recording_policy
from vllm_echo.core.trace import DraftTrace, TraceRecorder
from vllm_echo.core.tree import DraftTrees

CPU = torch.device("cpu")
VOCAB = 12
CURVE = CostCurve(
    step=((1, 10.0), (8, 12.0), (16, 20.0), (64, 68.0)),
    roots=Line(0.1, 0.01),
    layer=Line(0.2, 0.02),
    catch_up=Line(0.1, 0.01),
    control=Line(0.3, 0.001),
)


class BigramHead:
    """Children depend on the node's token alone."""

    def __init__(self, log_probs: torch.Tensor, roots: torch.Tensor):
        self._log_probs = log_probs
        self._roots = roots

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._children(self._roots, width)

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._children(frontier.tokens.long(), width)

    def _children(self, parents: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, tokens = self._log_probs[parents].topk(width, dim=-1)
        return tokens.to(torch.int32), log_probs


def bigram_log_probs() -> torch.Tensor:
    logits = 2.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    return logits.log_softmax(dim=-1)


def draft_batch(num_requests: int, num_nodes: int) -> DraftBatch:
    no = torch.zeros(num_requests, dtype=torch.bool)
    most = torch.full((num_requests,), num_nodes, dtype=torch.int32)
    return DraftBatch(most, ~no, no, most.clone(), no)


def record() -> DraftTrace:
    """Nine requests whose text is drawn from the head's own distribution, recorded by the code
    that records in an engine. The last one has a single token."""
    log_probs, random = bigram_log_probs(), np.random.default_rng(5)
    config = EchoConfig(
        policy="echo", k_max=32, num_speculative_tokens=9, max_depth=5, target_depth=5, top_k=3
    )
    recorder = TraceRecorder(make_recording_policy(config).shape)
    pipeline = EchoPipeline(config, 1, CPU)
    pipeline.policy = make_recording_policy(config)
    for request, length in enumerate((40, 40, 33, 25, 40, 7, 2, 38, 1)):
        token, prompt = request % VOCAB, 5 + request
        for position in range(1, length + 1):
            load = StepLoad(1, 0, prompt + position)
            proposal = pipeline.propose_trees(
                BigramHead(log_probs, torch.tensor([token])),
                draft_batch(1, 9),
                torch.tensor([0]),
                pipeline.policy.offer(load),
                load,
            )
            key, context = str(request), prompt + position - 1
            recorder.add([key], [position], [context], [token], proposal.candidates, [0])
            token = int(random.choice(VOCAB, p=log_probs[token].double().softmax(0).numpy()))
    return recorder.take()


def trees_of(
    config: EchoConfig, head: DraftHead, num_requests: int
) -> list[list[tuple[int, int, int]]]:
    pipeline = EchoPipeline(config, num_requests, CPU)
    load = StepLoad(num_requests, 0, 0)
    proposal = pipeline.propose_trees(
        head,
        draft_batch(num_requests, config.num_speculative_tokens),
        torch.arange(num_requests),
        pipeline.policy.offer(load),
        load,
    )
    return as_lists(proposal.trees)


def as_lists(trees: DraftTrees) -> list[list[tuple[int, int, int]]]:
    rows = torch.stack([trees.tokens, trees.parents, trees.depths], dim=2).tolist()
    counts = trees.num_nodes.tolist()
    return [list(map(tuple, row[:count])) for row, count in zip(rows, counts, strict=True)]
