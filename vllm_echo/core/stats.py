# SPDX-License-Identifier: Apache-2.0
"""What a step did, in counts: what metrics and the periodic log line are made of.

A step verifies the trees that the step before drafted, then drafts the next ones, so one step's
counts speak of two generations of trees; sums over many steps agree. Only ints and lists of ints:
counts travel between processes as ``to_dict``, and merge by adding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import zip_longest
from typing import Any

import torch

from vllm_echo.core.pipeline import Proposal
from vllm_echo.core.tree import AcceptedPaths, SuperTree


class Undrafted(IntEnum):
    """Why a request that goes on has no candidate in a step. The first of them that holds."""

    PREFILL = 0
    """Its prompt is not all computed."""
    NO_SAMPLE = 1
    """No token of the target's could be sampled: its logits are no numbers."""
    THINKING_BUDGET = 2
    MAX_MODEL_LEN = 3
    """No slot for a node is left in its context."""
    LAST_TOKEN = 4
    """Its next token is its last."""
    HEAD_CONTEXT = 5
    """It is longer than the head's context."""
    NO_CURVE = 6
    """The policy needs a cost curve, and there is none."""
    NO_BUDGET = 7
    """`k_max` is 0, or less than a node for everybody where no budget moves."""
    NO_GAIN = 8
    """At this load no candidate pays."""
    NO_ROWS = 9
    """The scheduler's rows are taken by the requests themselves and by prompts."""
    NO_SCORE = 10
    """The head's own logits are no numbers."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass
class StepStats:
    """Counts of one step, or of several merged ones. Lists are as long as they need to be."""

    steps_with_drafts: int = 0
    """Steps in which the draft model drafted for at least one request."""
    steps_without_drafts: int = 0
    drafted: list[int] = field(default_factory=list)
    """[d]: candidates of depth d + 1, before the budget decides."""
    verified: list[int] = field(default_factory=list)
    """[d]: nodes of depth d + 1 in the target's forward."""
    emitted: list[int] = field(default_factory=list)
    """[n]: requests with at least one node verified that emitted n + 1 tokens in the step."""
    gate_passes: list[int] = field(default_factory=list)
    """[d]: requests that passed the gate at depth d."""
    gate_truncations: list[int] = field(default_factory=list)
    """[d]: requests that the gate at depth d truncated."""
    offered: int = 0
    """K_max, summed over the steps with drafts."""
    used: int = 0
    """Nodes handed to the engine for the next step; at most ``offered``."""
    moved: int = 0
    """Nodes beyond an even split of ``offered`` over the requests drafted for."""
    on_depth: int = 0
    """Of ``used``: the trees' heights, the one node a layer that makes a tree deeper."""
    on_width: int = 0
    """Of ``used``: all other nodes."""
    undrafted: list[int] = field(default_factory=list)
    """[reason]: requests that go on and have no candidate, by ``Undrafted``."""

    @classmethod
    def of_step(
        cls,
        tree: SuperTree,
        paths: AcceptedPaths,
        proposal: Proposal | None,
        undrafted: Sequence[int] = (),
    ) -> "StepStats":
        """The step that verified ``tree``, kept ``paths`` and then proposed; None where it
        drafted for nobody. ``undrafted`` [reason]: requests that were left out of the proposal."""
        stats = cls(undrafted=list(undrafted))
        if tree.num_nodes:
            stats._count_acceptance(tree, paths)
        if proposal is None or proposal.trees.num_nodes.shape[0] == 0:
            stats.steps_without_drafts = 1
        else:
            stats.steps_with_drafts = 1
            stats._count_proposal(proposal)
        return stats

    def _count_acceptance(self, tree: SuperTree, paths: AcceptedPaths) -> None:
        self.verified = torch.bincount(tree.depths)[1:].tolist()
        has_nodes = tree.cu_rows.diff() > 1
        self.emitted = torch.bincount(paths.num_accepted[has_nodes]).tolist()

    def _count_proposal(self, proposal: Proposal) -> None:
        trees, candidates, growth = proposal.trees, proposal.candidates, proposal.growth
        # A column of candidates holds one depth: they are appended layer by layer.
        is_candidate = candidates.scores > -torch.inf
        in_column = is_candidate.count_nonzero(dim=0).double()
        self.drafted = torch.bincount(candidates.depths[0], in_column)[1:].int().tolist()
        without = ~is_candidate.any(dim=1)
        if without.any():
            without_budget = int((growth.limits.caps[without] == 0).sum())
            self._leave_out(Undrafted.NO_BUDGET, without_budget)
            self._leave_out(Undrafted.NO_SCORE, int(without.sum()) - without_budget)
        self.gate_passes = _by_depth(growth.passed)
        self.gate_truncations = _by_depth(growth.cut)
        self.offered = proposal.decision.budget
        self.used = int(trees.num_nodes.sum())
        self.moved = nodes_moved(trees.num_nodes, self.offered)
        place = torch.arange(trees.depths.shape[1], device=trees.depths.device)
        taken = place < trees.num_nodes[:, None]
        self.on_depth = int((trees.depths * taken).amax(dim=1).sum())
        self.on_width = self.used - self.on_depth

    def _leave_out(self, reason: Undrafted, count: int) -> None:
        if count:
            self.undrafted += [0] * (reason + 1 - len(self.undrafted))
            self.undrafted[reason] += count

    @property
    def accepted(self) -> list[int]:
        """[d]: accepted nodes of depth d + 1. A path holds one node of every depth down to its
        end, so these are the requests that emitted more than d + 1 tokens."""
        return [sum(self.emitted[depth:]) for depth in range(1, len(self.emitted))]

    @property
    def num_steps(self) -> int:
        return self.steps_with_drafts + self.steps_without_drafts

    def merge(self, other: "StepStats") -> None:
        """Add ``other``'s counts."""
        for f in fields(self):
            mine, more = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, list):
                total = [a + b for a, b in zip_longest(mine, more, fillvalue=0)]
                setattr(self, f.name, total)
            else:
                setattr(self, f.name, mine + more)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StepStats":
        """The inverse of ``to_dict``."""
        return cls(**values)


def nodes_moved(num_nodes: torch.Tensor, offered: int) -> int:
    """Nodes that requests hold beyond an even split of the budget ``offered``, which they have
    from requests that hold less. ``num_nodes`` [R].

    Where the budget does not divide, as many requests as there are nodes left over may hold one
    node more, whichever they are.
    """
    share, rest = divmod(offered, num_nodes.shape[0])
    beyond = (num_nodes - share).clamp_(min=0)
    return int(beyond.sum()) - min(rest, int(beyond.count_nonzero()))


def _by_depth(counts: dict[int, int]) -> list[int]:
    return [counts.get(depth, 0) for depth in range(max(counts, default=-1) + 1)]
