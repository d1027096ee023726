# SPDX-License-Identifier: Apache-2.0
"""Random draft traces, and their roots for the reference."""

import random
from dataclasses import fields

import numpy as np

from vllm_echo.core.trace import DraftTrace
from vllm_echo.reference import trace as reference
from vllm_echo.reference.schedule import ROOT, Node

VOCAB = 3  # so small that paths are accepted often


def random_trace(source: random.Random, num_requests: int | None = None) -> DraftTrace:
    """Candidates anywhere, some of them not drafted, in outputs with gaps (steps that were not
    recorded)."""
    max_depth = source.randint(1, 4)
    depths = [d for d in range(1, max_depth + 1) for _ in range(source.randint(1, 3))]
    requests, positions = [], []
    for request in range(source.randint(1, 4) if num_requests is None else num_requests):
        position = 0
        for _ in range(source.randint(1, 6)):
            position += 1 if source.random() < 0.9 else 3
            requests.append(request)
            positions.append(position)
    shape = (len(requests), len(depths))
    trace = DraftTrace(
        requests=np.array(requests, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        context=np.array(positions, dtype=np.int32) + 7,
        root_tokens=np.array([source.randrange(VOCAB) for _ in requests], dtype=np.int32),
        tokens=np.zeros(shape, dtype=np.int32),
        parents=np.full(shape, ROOT, dtype=np.int32),
        log_probs=np.full(shape, -np.inf, dtype=np.float32),
        depths=np.array(depths, dtype=np.int32),
    )
    for row in range(len(requests)):
        for column, depth in enumerate(depths):
            above = [c for c in range(column) if depths[c] == depth - 1]
            above = [c for c in above if np.isfinite(trace.log_probs[row, c])]
            if source.random() < 0.2 or (depth > 1 and not above):
                continue  # not drafted
            trace.tokens[row, column] = source.randrange(VOCAB)
            trace.parents[row, column] = source.choice(above) if depth > 1 else ROOT
            trace.log_probs[row, column] = -source.random()
    return trace


def as_roots(trace: DraftTrace) -> list[reference.Root]:
    roots = []
    for row in range(trace.num_roots):
        columns = zip(
            trace.tokens[row].tolist(),
            trace.parents[row].tolist(),
            trace.depths.tolist(),
            trace.log_probs[row].tolist(),
            strict=True,
        )
        nodes = [Node(*node) if np.isfinite(node[3]) else None for node in columns]
        place = int(trace.requests[row]), int(trace.positions[row]), int(trace.root_tokens[row])
        roots.append(reference.Root(*place, nodes))
    return roots


def assert_same(one: DraftTrace, other: DraftTrace) -> None:
    for field in fields(DraftTrace):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert mine.dtype == theirs.dtype, field.name
        assert np.array_equal(mine, theirs), field.name
