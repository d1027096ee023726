# SPDX-License-Identifier: Apache-2.0
"""Random trees, as lists and as tensors, and what a walk through them did."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from vllm_echo.core.pack import pack_trees
from vllm_echo.core.tree import BITS_PER_WORD, AcceptedPaths, DraftTrees, SuperTree
from vllm_echo.reference.schedule import ROOT, Node

CPU = torch.device("cpu")
# Around every word of the ancestor bits, and the most that one request may have.
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255]


class Source(random.Random):
    """Random numbers from a seed that a failing test shows."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._given = seed

    def __repr__(self) -> str:
        return f"Source({self._given})"


# Not st.randoms: half of what that draws are steps without a request or a choice.
randoms = st.integers(0, 2**32 - 1).map(Source)


def as_lists(trees: DraftTrees) -> list[list[tuple[int, int, int]]]:
    """Per request its (token, parent, depth) rows, without what lies beyond ``num_nodes``."""
    columns = torch.stack([trees.tokens, trees.parents, trees.depths], dim=2).tolist()
    counts = trees.num_nodes.tolist()
    return [list(map(tuple, row[:count])) for row, count in zip(columns, counts, strict=True)]


def nodes_as_lists(trees: Sequence[Sequence[Node]]) -> list[list[tuple[int, int, int]]]:
    return [[node[:3] for node in tree] for tree in trees]


def draft_trees(trees: Sequence[Sequence[Node]], width: int | None = None) -> DraftTrees:
    """Tensors of the trees, padded with rubbish to ``width``."""
    width = max([1, *map(len, trees)]) if width is None else width

    def padded(values: list[list[int]]) -> torch.Tensor:
        rows = [row + [-7] * (width - len(row)) for row in values]
        return torch.tensor(rows, dtype=torch.int32).view(len(trees), width)

    return DraftTrees(
        padded([[node.token for node in tree] for tree in trees]),
        padded([[node.parent for node in tree] for tree in trees]),
        padded([[node.depth for node in tree] for tree in trees]),
        torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
    )


def random_tree(
    source: random.Random,
    num_nodes: int,
    shape: str = "any",
    vocab: int = 1000,
    max_depth: int = 1000,
) -> list[Node]:
    """A tree in topological order with distinct siblings: a "chain", "wide" (depth 1) or any."""
    root = Node(-1, ROOT, 0, 0.0)
    tree: list[Node] = []
    used: set[tuple[int, int]] = set()
    while len(tree) < num_nodes:
        parent = {"chain": len(tree) - 1, "wide": ROOT}.get(
            shape, source.randint(ROOT, len(tree) - 1)
        )
        token = source.randrange(vocab)
        above = root if parent == ROOT else tree[parent]
        if (parent, token) in used or above.depth == max_depth:
            continue
        used.add((parent, token))
        score = above.score - source.choice([0.0, 0.25, 1.0])
        tree.append(Node(token, parent, above.depth + 1, score))
    return tree


def pack_nodes(trees: Sequence[Sequence[Node]]) -> SuperTree:
    return pack_trees(draft_trees(trees))


def path_lists(paths: AcceptedPaths) -> list[tuple[list[int], list[int]]]:
    """Per request (outputs, accepted rows) without padding; checks that the rest is padding."""
    lists = []
    for r, accepted in enumerate(paths.num_accepted.tolist()):
        tokens, rows = paths.tokens[r].tolist(), paths.rows[r].tolist()
        assert set(tokens[accepted + 1 :]) <= {-1} and set(rows[accepted:]) <= {-1}
        lists.append((tokens[: accepted + 1], rows[:accepted]))
    return lists


def random_walk(source: random.Random, tree: SuperTree) -> AcceptedPaths:
    """From every root down to a random node."""
    paths = []
    for start, end in zip(tree.cu_rows[:-1].tolist(), tree.cu_rows[1:].tolist(), strict=True):
        row, path = source.randrange(end - start), []
        while row:
            path.insert(0, row)
            row = int(tree.parents[start + row])
        paths.append(path)
    longest = max(map(len, paths))
    rows = torch.tensor([path + [-1] * (longest - len(path)) for path in paths])
    return AcceptedPaths(
        tokens=torch.zeros(len(paths), longest + 1, dtype=torch.int32),
        rows=rows.view(len(paths), longest).to(torch.int32),
        num_accepted=torch.tensor([len(path) for path in paths], dtype=torch.int32),
    )


def is_first_child(tree: SuperTree, request: int, row: int) -> bool:
    """Whether no earlier row of the request has the same parent as ``row``."""
    parents = tree.parents[tree.cu_rows[request] : tree.cu_rows[request + 1]].tolist()
    return parents.index(parents[row]) == row


@dataclass
class Tally:
    """Shows that a test of acceptance accepted anything, and not first children only."""

    accepted: int = 0
    through_later_siblings: int = 0
    stopped_early: int = 0
    """Walks that ended at a node with children."""

    def add(self, tree: SuperTree, paths: AcceptedPaths) -> None:
        for request, (_, rows) in enumerate(path_lists(paths)):
            self.accepted += len(rows)
            self.through_later_siblings += sum(
                not is_first_child(tree, request, row) for row in rows
            )
            parents = tree.parents[tree.cu_rows[request] : tree.cu_rows[request + 1]].tolist()
            self.stopped_early += (rows[-1] if rows else 0) in parents

    def assert_all_happened(self) -> None:
        assert self.accepted > 0
        assert self.through_later_siblings > 0
        assert self.stopped_early > 0


def row_paths(tree: SuperTree) -> list[tuple[int, ...]]:
    """Per row the drafted tokens that it attends to, which is what its logits are made of."""
    first = [start for start, end in _spans(tree) for _ in range(start, end)]
    local_rows = [sorted(bits_of(words)) for words in tree.ancestors]
    tokens = tree.tokens.tolist()
    return [
        tuple(tokens[start + row] for row in rows if row > 0)
        for start, rows in zip(first, local_rows, strict=True)
    ]


def _spans(tree: SuperTree) -> list[tuple[int, int]]:
    offsets = tree.cu_rows.tolist()
    return list(zip(offsets[:-1], offsets[1:], strict=True))


def bits_of(words: torch.Tensor) -> frozenset[int]:
    """The set bits of int64 ``words`` [W]."""
    return frozenset(
        BITS_PER_WORD * word + bit
        for word, value in enumerate(words.tolist())
        for bit in range(BITS_PER_WORD)
        if value >> bit & 1
    )
