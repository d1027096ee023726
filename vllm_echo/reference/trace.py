# SPDX-License-Identifier: Apache-2.0
"""Labels of a draft trace, the obvious version: walk each candidate's path, token by token."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_echo.reference.schedule import ROOT, Node


class Root(NamedTuple):
    """An output position: the token that the target emitted there, and what was drafted from it."""

    request: int
    position: int
    token: int
    nodes: Sequence[Node | None]
    """None where nothing was drafted. A node's score is of no interest here."""


def labels(roots: Sequence[Root]) -> list[list[tuple[bool, bool]]]:
    """Per root and candidate (accepted, known): would verification have accepted it, as far as the
    output tells."""
    said = {(root.request, root.position): root.token for root in roots}
    return [[_label(said, root, node) for node in root.nodes] for root in roots]


def _label(said: dict[tuple[int, int], int], root: Root, node: Node | None) -> tuple[bool, bool]:
    if node is None:
        return False, False
    for ahead, token in enumerate(path_of(root.nodes, node), start=1):
        true_token = said.get((root.request, root.position + ahead))
        if true_token is None:
            return False, False  # the output ended before it could tell
        if true_token != token:
            return False, True
    return True, True


def path_of(nodes: Sequence[Node | None], node: Node) -> list[int]:
    if node.parent == ROOT:
        return [node.token]
    parent = nodes[node.parent]
    assert parent is not None, "drafted from what was not drafted"
    return [*path_of(nodes, parent), node.token]
