# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*, the obvious version: hand out K_max one node at a time.

Scores and confidences are Python floats that hold float32 values, so that comparisons and ties
come out as in the tensor version.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
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


def best_paying(
    scores: Sequence[Sequence[float]],
    caps: Sequence[int],
    most: int,
    tokens_per_ms: Callable[[int, float], float],
) -> list[int]:
    """Nodes per request of the fastest step: all sizes up to ``most`` are tried, each with the
    likeliest nodes, and of equally fast ones the smallest wins.

    ``scores[r]`` are log acceptance probabilities; ``tokens_per_ms(nodes, accepted)`` is the speed
    of a step with that many nodes, of which ``accepted`` are expected to be accepted.
    """
    counts = [0] * len(scores)
    chances = [
        [probability(score) for score in sorted(row, reverse=True)][:cap]
        for row, cap in zip(scores, caps, strict=True)
    ]
    accepted = 0.0
    best, fastest = list(counts), tokens_per_ms(0, 0.0)
    for nodes in range(1, most + 1):
        open_requests = [
            r for r, count in enumerate(counts) if count < len(chances[r]) and chances[r][count] > 0
        ]
        if not open_requests:
            break
        winner = max(open_requests, key=lambda r: (chances[r][counts[r]], -r))
        accepted += chances[winner][counts[winner]]
        counts[winner] += 1
        if tokens_per_ms(nodes, accepted) > fastest:
            best, fastest = list(counts), tokens_per_ms(nodes, accepted)
    return best


def share_evenly(wanted: Sequence[int], budget: int) -> list[int]:
    """One node each, in request order, round after round, until budget or wishes run out."""
    counts = [0] * len(wanted)
    while budget > 0 and counts != list(wanted):
        for r, wish in enumerate(wanted):
            if counts[r] < wish and budget > 0:
                counts[r] += 1
                budget -= 1
    return counts


def even_caps(max_nodes: Sequence[int], budget: int) -> list[int]:
    """Most nodes of each request when nobody may use what another leaves: the budget is dealt out
    to all that are drafted for, whether they can use it or not."""
    drafted = [r for r, most in enumerate(max_nodes) if most > 0]
    shares = [0] * len(max_nodes)
    for place, r in enumerate(drafted):
        shares[r] = len(range(place, budget, len(drafted)))
    return [min(share, most) for share, most in zip(shares, max_nodes, strict=True)]


def take_best(candidates: Sequence[Node], count: int) -> list[Node]:
    """The ``count`` best candidates, best first, ties by index; parents renumbered."""
    order = best_first(candidates, range(len(candidates)))
    place = {ROOT: ROOT, **{index: rank for rank, index in enumerate(order)}}
    taken = [candidates[index] for index in order[:count]]
    return [node._replace(parent=place[node.parent]) for node in taken]


def best_first(nodes: Sequence[Node], indices: Iterable[int]) -> list[int]:
    """``indices`` into ``nodes`` by descending score, ties by index."""
    return sorted(indices, key=lambda index: (-nodes[index].score, index))


def probability(score: float) -> float:
    """exp, rounded to float32."""
    return to_float32(math.exp(score))


def to_float32(value: float) -> float:
    """Round to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
