# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*, the obvious version: hand out K_max one node at a time.

Scores and confidences are Python floats that hold float32 values, so that comparisons and ties
come out as in the tensor version.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROOT = -1


class Node(NamedTuple):
    """A drafted token. ``parent`` is an index into the request's own list, or ``ROOT``."""

    token: int
    parent: int
    depth: int
    score: float


def grant_layer(confidence: Sequence[float], wants: Sequence[bool], budget: int) -> list[bool]:
    """One node for each request that wants a layer: highest confidence first, then first come."""
    granted = [False] * len(wants)
    for _ in range(budget):
        waiting = [r for r, want in enumerate(wants) if want and not granted[r]]
        if not waiting:
            break
        granted[max(waiting, key=lambda r: (confidence[r], -r))] = True
    return granted


def grant_width(
    scores: Sequence[Sequence[float]],
    truncated: Sequence[bool],
    granted: Sequence[int],
    caps: Sequence[int],
    budget: int,
) -> list[int]:
    """Nodes per request: each node left goes to the best candidate that nobody has taken yet.

    ``scores[r]`` are the possible candidates of request r. Truncated requests are served first.
    """
    counts = list(granted)
    descending = [sorted(row, reverse=True) for row in scores]
    for served in (True, False):
        while budget > 0:
            open_requests = [
                r
                for r, count in enumerate(counts)
                if truncated[r] == served and count < min(caps[r], len(descending[r]))
            ]
            if not open_requests:
                break
            winner = max(open_requests, key=lambda r: (descending[r][counts[r]], -r))
            counts[winner] += 1
            budget -= 1
    return counts


def share_evenly(wanted: Sequence[int], budget: int) -> list[int]:
    """One node each, in request order, round after round, until budget or wishes run out."""
    counts = [0] * len(wanted)
    while budget > 0 and counts != list(wanted):
        for r, wish in enumerate(wanted):
            if counts[r] < wish and budget > 0:
                counts[r] += 1
                budget -= 1
    return counts


def take_best(candidates: Sequence[Node], count: int) -> list[Node]:
    """The ``count`` best candidates, best first, ties by index; parents renumbered."""
    order = best_first(candidates, range(len(candidates)))
    place = {ROOT: ROOT, **{index: rank for rank, index in enumerate(order)}}
    taken = [candidates[index] for index in order[:count]]
    return [node._replace(parent=place[node.parent]) for node in taken]


def best_first(nodes: Sequence[Node], indices: Iterable[int]) -> list[int]:
    """``indices`` into ``nodes`` by descending score, ties by index."""
    return sorted(indices, key=lambda index: (-nodes[index].score, index))
