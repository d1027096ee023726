# SPDX-License-Identifier: Apache-2.0
"""Stage *pack*, the obvious version: what the engine scheduled, as rows with their ancestors."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_echo.reference.schedule import ROOT, Node


class Row(NamedTuple):
    """A row of the super-tree; ``parent`` and ``ancestors`` are rows of the same request."""

    token: int
    parent: int
    depth: int
    ancestors: frozenset[int]


def read_tree(stored: Sequence[Node], scheduled: Sequence[int]) -> list[Node]:
    """The stored tree's leading nodes if the engine scheduled just these, otherwise a chain."""
    leading = list(stored[: len(scheduled)])
    if [node.token for node in leading] == list(scheduled):
        return leading
    return [Node(token, index - 1, index + 1, 0.0) for index, token in enumerate(scheduled)]


def pack_trees(trees: Sequence[Sequence[Node]]) -> list[list[Row]]:
    """Per request its rows: the root, then the nodes in order."""
    return [_pack(tree) for tree in trees]


def _pack(tree: Sequence[Node]) -> list[Row]:
    rows = [Row(-1, -1, 0, frozenset({0}))]
    for index, node in enumerate(tree):
        parent = 0 if node.parent == ROOT else node.parent + 1
        own = rows[parent].ancestors | {index + 1}
        rows.append(Row(node.token, parent, rows[parent].depth + 1, own))
    return rows
