# SPDX-License-Identifier: Apache-2.0
"""ECHO in one page: the stages in the order in which a step runs them. Read this first.

    draft -> gate -> schedule      propose_trees      after step t's tokens are known
    pack                           pack_step          at the start of step t + 1
    verify                         (the target's forward; the adapter's attention)
    accept                         accept.py          on its logits
    commit                         commit_paths       before anything reads the KV

Everything here takes and gives tensors and knows no engine. An adapter
(``vllm_echo.integration``) supplies the draft model, the forward and the caches, and keeps
requests in slots. docs/pipeline.md follows a request through the stages.
"""

import torch

from vllm_echo.config import EchoConfig
from vllm_echo.draft import DraftBatch, DraftHead, grow_trees
from vllm_echo.pack import pack_trees
from vllm_echo.policies import make_policy
from vllm_echo.schedule import grant_width, share_evenly, take_best
from vllm_echo.tree import CandidateTrees, DraftTrees, SuperTree, TreeTable


class EchoPipeline:
    """The runner-neutral part of a step; holds the trees from one step to the next."""

    def __init__(self, config: EchoConfig, max_requests: int, device: torch.device):
        self.config = config
        self.policy = make_policy(config)
        self.table = TreeTable(max_requests, config.num_speculative_tokens, device)

    def propose_trees(self, head: DraftHead, batch: DraftBatch, slots: torch.Tensor) -> DraftTrees:
        """Draft, gate and schedule the next step's trees, and store them by slot.

        ``slots`` [R] int64. Never more than ``k_max`` nodes in all.
        """
        candidates, budget_left = grow_trees(head, batch, self.policy, self.config.k_max)
        counts = self._spend(candidates, batch.max_nodes, budget_left)
        trees = take_best(candidates, counts, self.config.num_speculative_tokens)
        self.table.write(slots, trees)
        return trees

    def _spend(
        self, candidates: CandidateTrees, max_nodes: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """[R] int32 nodes per request."""
        if self.policy.elastic:
            return grant_width(candidates, candidates.num_layers, max_nodes, budget)
        drafted = candidates.scores.isfinite().sum(dim=1).to(max_nodes.dtype)
        return share_evenly(torch.minimum(drafted, max_nodes), budget)

    def pack_step(
        self, slots: torch.Tensor, scheduled: torch.Tensor, num_scheduled: torch.Tensor
    ) -> SuperTree:
        """The super-tree of what the engine scheduled: ``TreeTable.read``, packed."""
        return pack_trees(self.table.read(slots, scheduled, num_scheduled))
