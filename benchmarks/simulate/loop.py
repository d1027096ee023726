# SPDX-License-Identifier: Apache-2.0
"""Serving without an engine: requests walk along their recorded outputs, step by step.

What a step decides (budget, trees, packing, acceptance) is decided by ``vllm_echo`` itself;
the target's word is the recorded continuation. What steps cost is added up afterwards
(``costs.py``), so that one run can be priced for several machines.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.simulate.replay import RecordedTrees, ReplayHead
from vllm_echo.core.accept import accept_given
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.draft import DraftBatch
from vllm_echo.core.pack import pack_trees
from vllm_echo.core.pipeline import EchoPipeline
from vllm_echo.core.tree import DraftTrees

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """How many requests run at a time, and how it starts and ends."""

    batch: int
    num_steps: int = 300
    """Closed loop: a finished request is replaced at once, for so many steps. It starts with
    requests at random places of their outputs, as a server that has been running for long."""
    requests_per_slot: int = 0
    """Above 0: serve so many requests per slot (8 in all at least) from their beginning to the
    last one's end, as a benchmark of an engine does; ``num_steps`` does not count."""
    prefill: bool = False
    """Prompts cost rows. If not, a request begins with its first output token."""
    max_prefill_tokens: int = 2048
    """Prompt rows of a step; longer prompts go on in the next one."""
    seed: int = 0


@dataclass
class Step:
    """What happened in one step: all that its price depends on."""

    load: StepLoad
    num_drafting: int = 0
    """Requests that were drafted for; 0 where the budget was 0."""
    forwards: list[int] = field(default_factory=list)
    """Nodes of each draft forward."""
    offered: int = 0
    num_nodes: int = 0
    num_emitted: int = 0
    """By requests that decode."""
    num_first: int = 0
    """First tokens, given by the last rows of prompts."""
    num_unrecorded: int = 0


class Requests:
    """The requests in flight. Slots keep their order; a slot that gets no other request goes."""

    def __init__(self, recorded: RecordedTrees, workload: Workload):
        self._recorded = recorded
        self._workload = workload
        self._random = np.random.default_rng(workload.seed)
        self._queue: list[int] = []
        batch = workload.batch
        self._num_waiting = max(workload.requests_per_slot * batch, 8)
        if workload.requests_per_slot:
            self.rows = self._next_requests(min(batch, self._num_waiting))
            self.prompt_left = self._prompts(self.rows)
        else:
            decodable = (recorded.num_left > 0).nonzero()[0]
            self.rows = self._random.choice(decodable, batch)
            self.prompt_left = np.zeros(batch, dtype=np.int64)

    @property
    def done(self) -> bool:
        return len(self.rows) == 0

    def decoding(self) -> np.ndarray:
        """Slots that have their root."""
        return (self.prompt_left == 0).nonzero()[0]

    def prefill(self) -> tuple[int, int]:
        """Take the next prompt rows; returns how many, and how many prompts they complete. A
        complete one gives its first token, the root, with the end of this step, so ``decoding``
        is asked before."""
        before = np.cumsum(self.prompt_left) - self.prompt_left
        room = np.maximum(self._workload.max_prefill_tokens - before, 0)
        taken = np.minimum(self.prompt_left, room)
        self.prompt_left -= taken
        return int(taken.sum()), int(((taken > 0) & (self.prompt_left == 0)).sum())

    def advance(self, slots: np.ndarray, num_accepted: np.ndarray) -> int:
        """Each of ``slots`` emits its accepted path and one token more; returns how many in all."""
        left = self._recorded.num_left[self.rows[slots]]
        emitted = np.minimum(num_accepted + 1, left)
        self.rows[slots] += emitted
        self._replace(slots[emitted == left])
        return int(emitted.sum())

    def _replace(self, finished: np.ndarray) -> None:
        rows = self._next_requests(len(finished))
        again, over = finished[: len(rows)], finished[len(rows) :]
        self.rows[again] = rows
        self.prompt_left[again] = self._prompts(rows)
        self.rows = np.delete(self.rows, over)
        self.prompt_left = np.delete(self.prompt_left, over)

    def _next_requests(self, count: int) -> np.ndarray:
        """First rows of the next requests, fewer at the end: in the recorded order, again and
        again, or in the closed loop shuffled."""
        starts = self._recorded.starts
        if self._workload.requests_per_slot:
            count = min(count, self._num_waiting)
            self._num_waiting -= count
        while len(self._queue) < count:
            shuffled = self._random.permutation(len(starts))
            self._queue += (
                range(len(starts)) if self._workload.requests_per_slot else shuffled.tolist()
            )
        taken, self._queue = self._queue[:count], self._queue[count:]
        return starts[np.array(taken, dtype=np.int64)]

    def _prompts(self, rows: np.ndarray) -> np.ndarray:
        return self._recorded.context[rows] * int(self._workload.prefill)


def serve(recorded: RecordedTrees, config: EchoConfig | None, workload: Workload) -> list[Step]:
    """Every step of the workload under ``config``; None is plain decoding."""
    requests = Requests(recorded, workload)
    decide = None if config is None else EchoPipeline(config, workload.batch, CPU)
    steps: list[Step] = []
    while not requests.done and (workload.requests_per_slot or len(steps) < workload.num_steps):
        steps.append(_step(recorded, decide, requests))
    return steps


def _step(recorded: RecordedTrees, decide: EchoPipeline | None, requests: Requests) -> Step:
    slots = requests.decoding()
    rows = torch.from_numpy(requests.rows[slots])
    context = int(recorded.context[requests.rows[slots]].sum())
    # When an engine drafts it does not know yet which prompts the next step will take in.
    known = StepLoad(len(slots), 0, context)
    num_prompt_rows, num_first = requests.prefill()
    step = Step(StepLoad(len(slots), num_prompt_rows, context), num_first=num_first)
    accepted = torch.zeros(len(slots), dtype=torch.int32)
    if decide is not None and len(slots):
        accepted = _speculate(recorded, decide, rows, known, step)
    step.num_emitted = requests.advance(slots, accepted.numpy())
    return step


def _speculate(
    recorded: RecordedTrees,
    decide: EchoPipeline,
    rows: torch.Tensor,
    load: StepLoad,
    step: Step,
) -> torch.Tensor:
    """Draft and verify; fills ``step`` in, and returns the accepted lengths [R] int32."""
    accepted = torch.zeros(rows.shape[0], dtype=torch.int32)
    positions = torch.from_numpy(recorded.trace.positions)[rows]
    tokens_left = (recorded.max_tokens - positions - 1).clamp(min=0).to(torch.int32)
    drafting = tokens_left.nonzero().flatten()
    if not drafting.numel():
        return accepted
    offer = decide.policy.offer(load)
    step.offered = offer.num_nodes
    if offer.num_nodes == 0:
        return accepted
    head = ReplayHead(recorded, rows[drafting])
    batch = _draft_batch(tokens_left[drafting], decide.config.num_speculative_tokens)
    trees = decide.propose_trees(head, batch, drafting, offer, load).trees
    step.num_drafting = drafting.numel()
    step.forwards = head.forwards
    step.num_unrecorded = head.num_unrecorded
    step.num_nodes = int(trees.num_nodes.sum())
    accepted[drafting] = _accept(trees, recorded.truth[rows[drafting]])
    return accepted


def _draft_batch(tokens_left: torch.Tensor, num_nodes: int) -> DraftBatch:
    """As an engine fills it in for greedy requests that may emit ``tokens_left`` [R] more after
    the next one, and have room enough."""
    no = torch.zeros(tokens_left.shape[0], dtype=torch.bool)
    return DraftBatch(
        max_nodes=torch.full_like(tokens_left, num_nodes),
        can_expand=~no,
        chain_only=no,
        max_depths=tokens_left.clamp(max=num_nodes),
        sampled=no,
    )


def _accept(trees: DraftTrees, truth: torch.Tensor) -> torch.Tensor:
    """[R] int32 accepted lengths; ``truth`` [R, D]: what the target says along the true path.
    Rows off that path are never visited, so what they say does not matter."""
    tree = pack_trees(trees)
    owner = torch.repeat_interleave(tree.cu_rows.diff().long())
    says = torch.nn.functional.pad(truth, (0, 1), value=-1)
    return accept_given(tree, says[owner, tree.depths.long()].contiguous()).num_accepted
