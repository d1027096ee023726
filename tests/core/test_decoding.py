# SPDX-License-Identifier: Apache-2.0
"""Whole generations through the pipeline, with a toy target: output equals plain decoding's token
for token, greedy and seeded, while the engine does what engines do."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.core.kit import CPU, Tally, path_lists, row_paths
from tests.core.machines import MACHINE
from tests.core.steps import TableHead, draft_batch
from vllm_echo.core.accept import accept_given, walk_paths
from vllm_echo.core.config import POLICIES, EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.tree import DraftTrees, SuperTree
from vllm_echo.reference.draft import Limits
from vllm_echo.reference.schedule import to_float32

VOCAB = 12
NUM_REQUESTS = 5
NUM_TOKENS = 40
Tokens = Sequence[int]


def target_logits(history: Tokens) -> torch.Tensor:
    """[VOCAB], a fixed function of the last three tokens."""
    seed = sum((token + 2) * 100**place for place, token in enumerate(history[-3:]))
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(history: Tokens, generator: torch.Generator | None) -> int:
    """The target's next token: one draw, or the argmax."""
    if generator is None:
        return int(target_logits(history).argmax())
    return int(torch.multinomial(target_logits(history).softmax(0), 1, generator=generator))


def generators(seeded: bool) -> list[torch.Generator | None]:
    return [torch.Generator().manual_seed(100 + r) if seeded else None for r in range(NUM_REQUESTS)]


def prompts() -> list[list[int]]:
    return [[r, r + 1, r + 2] for r in range(NUM_REQUESTS)]


def decode_plainly(seeded: bool) -> list[list[int]]:
    outputs = prompts()
    for history, generator in zip(outputs, generators(seeded), strict=True):
        for _ in range(NUM_TOKENS):
            history.append(sample(history, generator))
    return outputs


def draft_children(histories: list[list[int]], noise: float) -> Callable[..., list]:
    """The target's own logits, blurred: right often, and often with a later child only."""

    def children(request: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        history = [*histories[request], *path]
        seed = random.Random(f"{history[-4:]}").randrange(2**31)
        blur = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        log_probs = (target_logits(history) + noise * blur).log_softmax(0)
        best = log_probs.topk(5)
        scores = map(to_float32, best.values.tolist())
        return list(zip(best.indices.tolist(), scores, strict=True))

    return children


class Engine:
    """Schedules some of the requests in a step, and not always all that was drafted for them."""

    def __init__(self, config: EchoConfig, seeded: bool, source: random.Random):
        self.histories = prompts()
        self.tally = Tally()
        self._pipeline = EchoPipeline(config, NUM_REQUESTS, CPU)
        self._generators = generators(seeded)
        self._seeded = seeded
        self._drafts: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
        self._source = source

    def run(self) -> list[list[int]]:
        length = NUM_TOKENS + len(prompts()[0])
        while any(len(history) < length for history in self.histories):
            # Now and then a request skips a step (preempted) and keeps its tree.
            chosen = [r for r in range(NUM_REQUESTS) if self._source.random() < 0.8]
            if chosen:
                self._step(chosen)
        return [history[:length] for history in self.histories]

    def _step(self, requests: list[int]) -> None:
        slots = torch.tensor(requests)
        scheduled = [self._schedule(self._drafts[request]) for request in requests]
        width = max([1, *map(len, scheduled)])
        rows = [tokens + [-1] * (width - len(tokens)) for tokens in scheduled]
        counts = torch.tensor([len(tokens) for tokens in scheduled], dtype=torch.int32)
        tree = self._pipeline.pack_step(slots, torch.tensor(rows, dtype=torch.int32), counts)
        self._verify(tree, requests)
        self._propose(requests, slots)

    def _schedule(self, draft: list[int]) -> list[int]:
        """Whole, cut short, or with a token of the engine's own (which makes it a chain)."""
        fate = self._source.random()
        if fate < 0.15:
            return draft[: self._source.randint(0, len(draft))]
        if fate < 0.25 and draft:
            return [*draft[:-1], self._source.randrange(-1, VOCAB)]
        return list(draft)

    def _verify(self, tree: SuperTree, requests: list[int]) -> None:
        attended = row_paths(tree)

        def at(request: int, row: int) -> int:
            history = [*self.histories[requests[request]], *attended[row]]
            return sample(history, self._generators[requests[request]])

        if self._seeded:
            paths = walk_paths(
                tree, lambda rs, rows: torch.tensor(list(map(at, rs.tolist(), rows.tolist())))
            )
        else:
            owner = torch.repeat_interleave(tree.cu_rows.diff().long()).tolist()
            paths = accept_given(tree, torch.tensor(list(map(at, owner, range(len(owner))))))
        self.tally.add(tree, paths)
        for request, (outputs, _) in zip(requests, path_lists(paths), strict=True):
            self.histories[request].extend(outputs)

    def _propose(self, requests: list[int], slots: torch.Tensor) -> None:
        histories = [self.histories[request] for request in requests]
        head = TableHead(draft_children(histories, 0.7), len(requests), self._pipeline.policy)
        load = StepLoad(len(requests))
        offer = self._pipeline.policy.offer(load, len(requests) * self._seeded)
        batch = draft_batch(self._limits(requests))
        trees = self._pipeline.propose_trees(head, batch, slots, offer, load).trees
        assert int(trees.num_nodes.sum()) <= offer.num_nodes
        self._keep(requests, trees)

    def _limits(self, requests: list[int]) -> list[Limits]:
        """Request 0 is never drafted for, request 1 gets one layer, request 2 a grammar's chain."""
        most = self._pipeline.config.num_speculative_tokens
        return [
            Limits(most * (r != 0), can_expand=r != 1, chain_only=r == 2, sampled=self._seeded)
            for r in requests
        ]

    def _keep(self, requests: list[int], trees: DraftTrees) -> None:
        trees.validate()
        for request, tokens, count in zip(
            requests, trees.tokens.tolist(), trees.num_nodes.tolist(), strict=True
        ):
            self._drafts[request] = tokens[:count]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("k_max", [6, 14, 1000, "auto"])
def test_output_equals_plain_decoding(policy: str, k_max: int | str, seeded: bool) -> None:
    """Catches stale trees, wrong masks, and draws that plain decoding would not make: with a seed,
    each request's random stream is used up as without speculation."""
    config = EchoConfig(
        num_speculative_tokens=8,
        policy=policy,
        k_max=k_max,
        max_depth=5,
        target_depth=4,
        top_k=3,
        gates=(Gate(0, 0.2), Gate(2, 0.1)),
        profile=MACHINE,
    )
    engine = Engine(config, seeded, random.Random(0))
    assert engine.run() == decode_plainly(seeded)
    assert engine.tally.accepted > NUM_TOKENS
    assert engine.tally.through_later_siblings > 0 or policy == "chain"


def test_two_seeds_give_two_outputs() -> None:
    """The comparison above would be worthless if sampling were greedy in disguise."""
    sampled, greedy = decode_plainly(seeded=True), decode_plainly(seeded=False)
    assert all(a != b for a, b in zip(sampled, greedy, strict=True))
