# SPDX-License-Identifier: Apache-2.0
"""Stage *schedule*, the obvious version: hand out K_max one node at a time; and the order of
admission, which does the same for every K_max at once.

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


class Layers(NamedTuple):
    """What a request's own gates come to."""

    confidence: list[float]
    """Of the layers that it may pay for, one node each."""
    last: int
    """Candidates of deeper layers would not have been drafted."""
    truncated: bool


def pass_gates(
    nodes: Sequence[Node], cap: int, deepest: int, thresholds: Sequence[float | None]
) -> Layers:
    """Layer by layer, as if the budget never ended. ``thresholds`` by depth, for all layers."""
    confidence: list[float] = []
    if cap <= 0:
        return Layers(confidence, 0, False)
    for depth, threshold in enumerate(thresholds):
        layer = [node.score for node in nodes if node.depth == depth + 1]
        best = max(layer, default=-math.inf)
        if best == -math.inf:
            return Layers(confidence, depth + 1, False)
        if threshold is not None and not probability(best) > to_float32(threshold):
            return Layers(confidence, depth + 1, True)
        if len(confidence) < cap:
            confidence.append(probability(best))
        if len(confidence) <= depth or depth + 1 >= deepest or depth + 1 == len(thresholds):
            return Layers(confidence, depth + 1, False)
    return Layers(confidence, 1, False)


def places_by_gates(
    nodes: Sequence[Node], cap: int, layers: Layers, width: bool
) -> list[tuple[float, ...]]:
    """When a request may have 1, 2, ... nodes: depth before width, the truncated before others.
    ``nodes`` are those of the layers that count."""
    depth = [(0, at, -confidence) for at, confidence in enumerate(layers.confidence)]
    scores = sorted((node.score for node in nodes if math.isfinite(node.score)), reverse=True)
    left = scores[len(depth) : max(cap, 0)] if width else []
    return [*depth, *((1, not layers.truncated, -score) for score in left)]


def places_by_price(nodes: Sequence[Node], cap: int) -> list[tuple[float, ...]]:
    """The likeliest of all requests first."""
    worths = sorted((probability(node.score) for node in nodes), reverse=True)
    return [(-worth,) for worth in worths[: max(cap, 0)] if worth > 0]


def places_in_turns(nodes: Sequence[Node], cap: int) -> list[tuple[float, ...]]:
    """A node each, then the next."""
    possible = sum(math.isfinite(node.score) for node in nodes)
    return [(turn,) for turn in range(min(possible, max(cap, 0)))]


def admit_nodes(places: Sequence[Sequence[tuple[float, ...]]], budget: int) -> list[int]:
    """Nodes per request: the first ``budget`` places of all, ties by request and then by rank."""
    order = sorted(
        (place, r, rank) for r, row in enumerate(places) for rank, place in enumerate(row)
    )
    admitted = [r for _, r, _ in order[: max(budget, 0)]]
    return [admitted.count(r) for r in range(len(places))]


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
