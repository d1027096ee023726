# SPDX-License-Identifier: Apache-2.0
"""Row arithmetic at the seam, against one request and one row at a time."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import pack_nodes, random_tree, random_walk
from vllm_echo.integration.cpu.rows import as_rows, final_rows


def test_lists_become_padded_rows() -> None:
    rows, counts = as_rows([[5, 6], [], [7]])
    assert rows.tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert counts.tolist() == [2, 0, 1]
    rows, counts = as_rows([[], []])
    assert rows.tolist() == [[-1], [-1]] and counts.tolist() == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_final_rows(requests: list[tuple[int, int]], seed: int) -> None:
    """Requests of (nodes, rows up to the root), with random trees and random accepted paths."""
    source = random.Random(seed)
    tree = pack_nodes([random_tree(source, nodes) for nodes, _ in requests])
    paths = random_walk(source, tree)
    bounds = np.cumsum([0] + [linear + nodes for nodes, linear in requests]).astype(np.int32)
    rows, places, ends = final_rows(bounds, tree, paths)
    wanted_rows, wanted_places, wanted_ends = [], [], []
    for r, (_, linear) in enumerate(requests):
        path = paths.rows[r, : paths.num_accepted[r]].tolist()
        own = [*range(linear), *(linear - 1 + row for row in path)]
        wanted_rows += [int(bounds[r]) + row for row in own]
        wanted_places += [int(bounds[r]) + place for place in range(len(own))]
        wanted_ends.append(len(wanted_rows))
    assert rows.tolist() == wanted_rows
    assert places.tolist() == wanted_places
    assert ends.tolist() == wanted_ends
