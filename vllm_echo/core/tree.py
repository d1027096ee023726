# SPDX-License-Identifier: Apache-2.0
"""The tensors that cross stages, and what must hold of them.

    draft -> gate -> schedule -> pack -> verify -> accept -> commit

Words used everywhere: a *node* is one drafted token; the *root* is the last token that
the target has already emitted (it is part of no budget); a *tree* is one request's nodes;
the *super-tree* is all trees of a step; a *path* leads from a root to a node; a *slot* is
a request's row in the tree table, or, where KV is meant, a logical position of its KV.

One order makes the rest simple: a request's nodes are kept in **descending path score,
ties by index**. A child never scores above its parent and is created after it, so every
prefix of the list contains the parents of its nodes. "Which nodes survive" is therefore
one number per request, and whoever cuts a list from its end (budget, token budget,
context limit) leaves a tree.
"""

from dataclasses import dataclass

import torch

from vllm_echo import ops

ROOT = -1
"""Parent index of a node whose parent is the root, in candidate and tree tables."""

BITS_PER_WORD = 64


def num_words(num_bits: int) -> int:
    """int64 words that hold ``num_bits`` ancestor bits (at least one)."""
    return max(1, -(-num_bits // BITS_PER_WORD))


@dataclass
class CandidateTrees:
    """Everything drafted in a step, before the budget decides. Filled by ``draft``.

    R requests, C candidates per request at most. Candidates are appended layer by layer,
    so a parent's index is below its children's. Unused or forbidden places have score -inf.
    """

    tokens: torch.Tensor
    """[R, C] int32, ids of the target's vocabulary."""
    parents: torch.Tensor
    """[R, C] int32, index into the same row, ``ROOT`` for depth 1."""
    depths: torch.Tensor
    """[R, C] int32, 1 for children of the root."""
    scores: torch.Tensor
    """[R, C] float32, log of the product of the path's probabilities: the draft's, or under
    `goodput` calibrated ones of acceptance."""

    def leading(self, num_columns: int) -> "CandidateTrees":
        """The first columns of every request."""
        return CandidateTrees(
            tokens=self.tokens[:, :num_columns],
            parents=self.parents[:, :num_columns],
            depths=self.depths[:, :num_columns],
            scores=self.scores[:, :num_columns],
        )


@dataclass
class OrderedTrees:
    """Candidates in the order in which a budget admits them. Filled by ``schedule``.

    Rows are in descending path score (see the module's text).
    """

    tokens: torch.Tensor
    """[R, N] int32."""
    parents: torch.Tensor
    """[R, N] int32, index into the same row, always below the node's own; or ``ROOT``."""
    depths: torch.Tensor
    """[R, N] int32, 1 for children of the root."""
    keys: torch.Tensor
    """[R, N] int64, ascending within a request, unique over all: a budget of K admits the nodes
    with the K lowest. 2**63 - 1 where there is no such node."""


@dataclass
class DraftTrees:
    """The trees that the next step verifies. Filled by ``schedule``.

    Rows are in descending path score (see the module's text); row r of a request at or
    beyond ``num_nodes[r]`` is undefined.
    """

    tokens: torch.Tensor
    """[R, N] int32."""
    parents: torch.Tensor
    """[R, N] int32, index into the same row, always below the node's own; or ``ROOT``."""
    depths: torch.Tensor
    """[R, N] int32, 1 for children of the root."""
    num_nodes: torch.Tensor
    """[R] int32."""

    def validate(self) -> None:
        """Raise ValueError unless every request's list is a tree in topological order
        whose siblings carry distinct tokens. For tests: it loops."""
        for r, n in enumerate(self.num_nodes.tolist()):
            seen: set[tuple[int, int]] = set()
            for j in range(n):
                parent = int(self.parents[r, j])
                depth = 1 if parent == ROOT else int(self.depths[r, parent]) + 1
                child = (parent, int(self.tokens[r, j]))
                if not ROOT <= parent < j:
                    raise ValueError(f"request {r}, node {j}: parent {parent} not before it")
                if int(self.depths[r, j]) != depth:
                    raise ValueError(f"request {r}, node {j}: depth {int(self.depths[r, j])}")
                if child in seen:
                    raise ValueError(f"request {r}, node {j}: sibling with the same token")
                seen.add(child)


@dataclass
class SuperTree:
    """All trees of a step, flattened for one target forward. Filled by ``pack``.

    T rows; request r owns rows ``cu_rows[r]`` to ``cu_rows[r + 1]``: its root, then its
    nodes in order. Row indices in ``parents`` are local to the request (root: 0). Rows from
    ``cu_rows[R]`` on belong to nobody: padding (-1, -1, 0, no ancestor), where a forward has a
    fixed number of rows.
    """

    cu_rows: torch.Tensor
    """[R + 1] int32, prefix sums of 1 + nodes."""
    tokens: torch.Tensor
    """[T] int32, the node's token; -1 at roots."""
    parents: torch.Tensor
    """[T] int32, local row of the parent; -1 at roots."""
    depths: torch.Tensor
    """[T] int32, 0 at roots: rope position = root position + depth."""
    ancestors: torch.Tensor
    """[T, W] int64, bit j: the row attends to row j of its request (itself included)."""
    num_nodes: int
    """Of all requests, as whoever packs knows it; their roots are none. No shape tells it."""

    @property
    def num_requests(self) -> int:
        return self.cu_rows.shape[0] - 1


@dataclass
class AcceptedPaths:
    """What verification kept. Filled by ``accept``; R requests, L the longest path."""

    tokens: torch.Tensor
    """[R, L + 1] int32: accepted tokens, then the target's own next one; -1 padded."""
    rows: torch.Tensor
    """[R, L] int32: local rows of the accepted nodes, ascending; -1 padded."""
    num_accepted: torch.Tensor
    """[R] int32, 0 to L."""


class TreeTable:
    """Trees by slot, from the step that drafts them to the step that verifies them.

    A request holds one slot for its life, so a request that skips a step finds its tree
    again, and one that was given another tree cannot meet the old one.
    """

    def __init__(self, num_slots: int, max_nodes: int, device: torch.device):
        shape = (num_slots, max_nodes)
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.parents = torch.full(shape, ROOT, dtype=torch.int32, device=device)
        self.depths = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_nodes = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return self.num_nodes.shape[0]

    @property
    def max_nodes(self) -> int:
        return self.tokens.shape[1]

    def grow(self) -> range:
        """Double the table; returns the new slots. Existing trees stay where they are, the tensors
        do not. So a table that captured graphs may hold by its address, one on a device, has
        its slots for good: RuntimeError there."""
        old = self.num_slots
        if self.num_nodes.device.type != "cpu":
            raise RuntimeError(
                f"the tree table on {self.num_nodes.device} has {old} slots and cannot grow, since "
                "captured graphs hold its address; make it with a slot for every request there "
                "can be"
            )
        for name in ("tokens", "parents", "depths", "num_nodes"):
            rows = getattr(self, name)
            setattr(self, name, torch.cat([rows, torch.zeros_like(rows)]))
        return range(old, 2 * old)

    def write(self, slots: torch.Tensor, trees: DraftTrees) -> None:
        """Store trees[i] in slots[i]; ``slots`` [R] int64."""
        self.tokens[slots] = trees.tokens
        self.parents[slots] = trees.parents
        self.depths[slots] = trees.depths
        self.num_nodes[slots] = trees.num_nodes

    def clear(self, slots: torch.Tensor) -> None:
        """Forget the trees of ``slots`` [R] int64."""
        self.num_nodes[slots] = 0

    def read(
        self, slots: torch.Tensor, scheduled: torch.Tensor, num_scheduled: torch.Tensor
    ) -> DraftTrees:
        """The first ``num_scheduled`` nodes of each slot, for verification.

        ``scheduled`` [R, N] int32 holds the tokens that the engine really scheduled. Where
        they are not the leading tokens of the stored tree (a resumed request, a grammar
        that cut the draft, a placeholder) the scheduled tokens are taken as a chain:
        always valid, whatever they are.
        """
        table = (self.tokens, self.parents, self.depths, self.num_nodes)
        step = (slots, scheduled, num_scheduled)
        parents, depths = ops.read_trees(*table, *(t.contiguous() for t in step))
        return DraftTrees(scheduled, parents, depths, num_scheduled)
