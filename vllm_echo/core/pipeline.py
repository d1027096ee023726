# SPDX-License-Identifier: Apache-2.0
"""ECHO in one page: the stages in the order in which a step runs them. Read this first.

    decide                         policy.decide      plain data, on the host
    draft -> gate -> schedule      propose_trees      after step t's tokens are known
    pack                           pack_step          at the start of step t + 1
    verify                         (the target's forward; the adapter's attention)
    accept                         accept.py          on its logits
    commit                         commit_paths       before anything reads the KV

Everything here takes and gives tensors and knows no engine. It is the order for a runner on a
CPU; docs/pipeline.md says which of the functions one on a device can use. An adapter
(``vllm_echo.integration``) supplies the draft model, the forward and the caches, and keeps
requests in slots. docs/pipeline.md follows a request through the stages.
"""

from dataclasses import dataclass

import torch

from vllm_echo.core.budget import NOTHING, Offer
from vllm_echo.core.config import EchoConfig
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.decision import Decision
from vllm_echo.core.draft import DraftBatch, DraftHead, grow_trees
from vllm_echo.core.gate import Growth
from vllm_echo.core.pack import pack_trees
from vllm_echo.core.policies import make_policy
from vllm_echo.core.schedule import schedule
from vllm_echo.core.tree import CandidateTrees, DraftTrees, SuperTree, TreeTable
from vllm_echo.core.watch import CostWatch

_MOST_WATCHES = 32


@dataclass
class Proposal:
    """The next step's trees, and how they came about (for metrics and traces)."""

    decision: Decision
    trees: DraftTrees
    candidates: CandidateTrees
    growth: Growth


class EchoPipeline:
    """The runner-neutral part of a step; holds the trees from one step to the next."""

    def __init__(self, config: EchoConfig, max_requests: int, device: torch.device):
        self._watches: dict[EchoConfig, CostWatch] = {}
        self.set_options(config)
        self.table = TreeTable(max_requests, config.num_speculative_tokens, device)

    def set_options(self, config: EchoConfig) -> None:
        """Decide by ``config`` from the next step on; the trees of the last step stay, and what the
        steps have shown under options that held before."""
        self.config = config
        self.policy = make_policy(config)
        self.watch = self._watch_for(config)

    def _watch_for(self, config: EchoConfig) -> CostWatch | None:
        curve = config.profile if config.needs_profile and config.k_max != 0 else None
        if curve is None or not config.watch_costs:
            return None
        if len(self._watches) >= _MOST_WATCHES:
            self._watches.clear()
        return self._watches.setdefault(config, CostWatch(curve))

    def offer(self, load: StepLoad, num_sampled: int = 0) -> Offer:
        """The budget of the step that carries ``load``, of whose requests ``num_sampled`` sample.
        To be asked once a step: where costs are watched, a few steps are to be different."""
        budget = self.policy.budget
        if self.watch is None or isinstance(budget, Offer) or load.num_requests == 0:
            return self.policy.offer(load, num_sampled)
        budget.follow(self.watch.curve(load))
        usual = self.policy.offer(load, num_sampled)
        if not self.watch.drafts(load, usual.num_nodes > 0):
            return NOTHING
        if usual.num_nodes:
            return usual
        budget.follow(self.watch.probing_curve(load))
        return self.watch.probe(load, self.policy.offer(load, num_sampled))

    def propose_trees(
        self,
        head: DraftHead,
        batch: DraftBatch,
        slots: torch.Tensor,
        offer: Offer,
        load: StepLoad,
    ) -> Proposal:
        """Draft, gate and schedule the next step's trees, and store them by slot.

        ``slots`` [R] int64. Never more than ``offer.num_nodes`` nodes in all.
        """
        decision = self.policy.decide(load, offer)
        candidates, growth = grow_trees(head, batch, decision)
        trees = schedule(candidates, growth.limits, decision, self.table.max_nodes)
        self.table.write(slots, trees)
        return Proposal(decision, trees, candidates, growth)

    def pack_step(
        self,
        slots: torch.Tensor,
        scheduled: torch.Tensor,
        num_scheduled: torch.Tensor,
        max_rows: int | None = None,
        num_nodes: int | None = None,
    ) -> SuperTree:
        """The super-tree of what the engine scheduled: ``TreeTable.read``, packed."""
        return pack_trees(self.table.read(slots, scheduled, num_scheduled), max_rows, num_nodes)
