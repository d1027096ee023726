# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk: the compiled one, the level-by-level one, and the reference agree."""

import random
from collections.abc import Callable

import pytest
import torch

from tests.core.kit import SIZES, Tally, pack_nodes, path_lists, random_tree, row_paths
from vllm_echo.core.accept import EndsWith, accept_given, end_paths, walk_paths
from vllm_echo.core.tree import AcceptedPaths, SuperTree
from vllm_echo.reference.accept import accept_one
from vllm_echo.reference.schedule import Node

VOCAB = 40


def random_targets(source: random.Random, tree: SuperTree) -> torch.Tensor:
    """[T] int64: mostly a random child's token, so that walks go deep and turn sideways."""
    targets = []
    offsets = tree.cu_rows.tolist()
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        parents, tokens = tree.parents[start:end].tolist(), tree.tokens[start:end].tolist()
        for row in range(end - start):
            children = [t for t, parent in zip(tokens, parents, strict=True) if parent == row]
            follow = children and source.random() < 0.8
            targets.append(source.choice(children) if follow else source.randrange(VOCAB))
    return torch.tensor(targets, dtype=torch.int64)


def walk_given(tree: SuperTree, targets: torch.Tensor) -> AcceptedPaths:
    return walk_paths(tree, lambda requests, rows: targets[rows])


def expected_paths(tree: SuperTree, targets: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    offsets = tree.cu_rows.tolist()
    return [
        accept_one(
            targets[start:end].tolist(),
            tree.tokens[start:end].tolist(),
            tree.parents[start:end].tolist(),
        )
        for start, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]


def test_both_walks_agree_with_the_reference_on_random_batches() -> None:
    """Catches scattered acceptance, ragged batches with indices of the longest path, and a walk
    that steps into a cousin with the right token."""
    source = random.Random(0)
    tally = Tally()
    for _ in range(150):
        sizes = source.choices([0, 1, 2, 3, 5, 9, 20], k=source.randint(1, 8))
        shapes = source.choices(["any", "any", "chain", "wide"], k=len(sizes))
        trees = [
            random_tree(source, size, shape, VOCAB)
            for size, shape in zip(sizes, shapes, strict=True)
        ]
        packed = pack_nodes(trees)
        targets = random_targets(source, packed)
        paths = walk_given(packed, targets)
        assert path_lists(paths) == expected_paths(packed, targets)
        assert path_lists(accept_given(packed, targets)) == expected_paths(packed, targets)
        assert path_lists(accept_given(packed, targets.int())) == expected_paths(packed, targets)
        tally.add(packed, paths)
    tally.assert_all_happened()


@pytest.mark.parametrize("num_nodes", SIZES)
def test_trees_of_every_size_are_walked(num_nodes: int) -> None:
    """Catches limits at a word of 32 or 64 nodes: the walk is led to one node after another."""
    source = random.Random(num_nodes)
    tree = random_tree(source, num_nodes, vocab=1000)
    packed = pack_nodes([tree])
    goals = range(num_nodes + 1) if num_nodes < 40 else [0, 1, *range(num_nodes - 4, num_nodes + 1)]
    tally = Tally()
    for goal in goals:
        targets = torch.full((num_nodes + 1,), 5000, dtype=torch.int64)
        path = []
        row = goal
        while row > 0:
            path.append(row)
            targets[packed.parents[row]] = packed.tokens[row].long()
            row = int(packed.parents[row])
        for walk in (walk_given, accept_given):
            paths = walk(packed, targets)
            assert path_lists(paths)[0][1] == path[::-1]
            assert path_lists(paths)[0][0][-1] == 5000
            tally.add(packed, paths)
    assert tally.accepted > 0
    assert num_nodes < 3 or tally.through_later_siblings > 0


def test_a_root_alone_gives_the_targets_token() -> None:
    packed = pack_nodes([[], []])
    for walk in (walk_given, accept_given):
        paths = walk(packed, torch.tensor([7, 9]))
        assert path_lists(paths) == [([7], []), ([9], [])]


def test_no_request_gives_no_path() -> None:
    packed = pack_nodes([])
    for walk in (walk_given, accept_given):
        assert path_lists(walk(packed, torch.zeros(0, dtype=torch.int64))) == []


def test_one_token_is_drawn_per_output_token_in_the_order_of_the_path() -> None:
    """Catches sampling of rows that no walk visits: a request's random stream would run ahead of
    plain decoding's."""
    source = random.Random(2)
    tally = Tally()
    for _ in range(40):
        trees = [random_tree(source, source.randint(0, 9), vocab=VOCAB) for _ in range(5)]
        packed = pack_nodes(trees)
        targets = random_targets(source, packed)
        drawn: list[list[int]] = [[] for _ in trees]

        def sample(
            requests: torch.Tensor,
            rows: torch.Tensor,
            packed: SuperTree = packed,
            targets: torch.Tensor = targets,
            drawn: list[list[int]] = drawn,
        ) -> torch.Tensor:
            assert requests.tolist() == sorted(set(requests.tolist()))
            for request, row in zip(requests.tolist(), rows.tolist(), strict=True):
                drawn[request].append(row - int(packed.cu_rows[request]))
            return targets[rows]

        paths = walk_paths(packed, sample)
        for (outputs, rows), visited in zip(path_lists(paths), drawn, strict=True):
            assert visited == [0, *rows]
            assert len(outputs) == len(visited)
        tally.add(packed, paths)
    tally.assert_all_happened()


class Ends:
    """Ends a request with its second even token: a rule with a history."""

    def __init__(self, num_requests: int):
        self.outputs: list[list[int]] = [[] for _ in range(num_requests)]

    @staticmethod
    def judge(output: list[int]) -> bool:
        return output[-1] % 2 == 0 and sum(token % 2 == 0 for token in output) == 2

    def ends_with(self, request: int, token: int) -> bool:
        self.outputs[request].append(token)
        return self.judge(self.outputs[request])


def walk_to_ends(tree: SuperTree, targets: torch.Tensor, ends_with: EndsWith) -> AcceptedPaths:
    return walk_paths(tree, lambda requests, rows: targets[rows], ends_with)


def cut_at_ends(tree: SuperTree, targets: torch.Tensor, ends_with: EndsWith) -> AcceptedPaths:
    return end_paths(accept_given(tree, targets), ends_with)


@pytest.mark.parametrize("walk", [walk_to_ends, cut_at_ends])
def test_a_path_leads_to_its_requests_end_and_no_further(
    walk: Callable[[SuperTree, torch.Tensor, EndsWith], AcceptedPaths],
) -> None:
    """Catches a stop token that is walked through: what lies behind it would count as computed.
    The rule is asked along the path, once a token, and never behind an end."""
    source = random.Random(5)
    cut = 0
    tally = Tally()
    for _ in range(100):
        trees = [random_tree(source, source.randint(0, 12), vocab=VOCAB) for _ in range(5)]
        packed = pack_nodes(trees)
        targets = random_targets(source, packed)
        ends = Ends(len(trees))
        paths = walk(packed, targets, ends.ends_with)
        whole = expected_paths(packed, targets)
        for (outputs, rows), (uncut, uncut_rows), asked in zip(
            path_lists(paths), whole, ends.outputs, strict=True
        ):
            lengths = range(1, len(uncut) + 1)
            end = next((n for n in lengths if Ends.judge(uncut[:n])), len(uncut))
            assert (outputs, rows) == (uncut[:end], uncut_rows[: end - 1])
            assert asked == uncut[: min(end, len(uncut_rows))]
            cut += end < len(uncut)
        tally.add(packed, paths)
    tally.assert_all_happened()
    assert cut > 50


def test_nothing_is_drawn_behind_an_end() -> None:
    """Catches a random stream ahead of plain decoding's, from which a session would go on."""
    packed = pack_nodes([[Node(3, -1, 1, 0.0), Node(4, 0, 2, 0.0)]] * 2)
    drawn = []

    def sample(requests: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        drawn.extend(requests.tolist())
        return torch.tensor([3, 4, 5])[rows % 3]

    paths = walk_paths(packed, sample, lambda request, token: request == 0 and token == 3)
    assert path_lists(paths) == [([3], []), ([3, 4, 5], [1, 2])]
    assert drawn == [0, 1, 1, 1]


def test_accepted_rows_carry_the_outputs_and_attend_to_just_their_path() -> None:
    """The outputs, the KV that is committed and the mask under which it was made are one path."""
    source = random.Random(3)
    tally = Tally()
    for _ in range(60):
        packed = pack_nodes([random_tree(source, 12, vocab=VOCAB) for _ in range(3)])
        paths = accept_given(packed, random_targets(source, packed))
        attended = row_paths(packed)
        for request, (outputs, rows) in enumerate(path_lists(paths)):
            assert rows == sorted(rows)
            for count, row in enumerate(rows, start=1):
                assert list(attended[int(packed.cu_rows[request]) + row]) == outputs[:count]
        tally.add(packed, paths)
    tally.assert_all_happened()


def test_a_walk_down_later_siblings_only() -> None:
    """Catches acceptance that follows first children, by a tree whose first children are wrong."""
    tree = [
        Node(1, -1, 1, 0.0),
        Node(2, -1, 1, 0.0),
        Node(3, 0, 2, 0.0),
        Node(3, 1, 2, 0.0),
        Node(4, 1, 2, 0.0),
        Node(5, 4, 3, 0.0),
    ]
    packed = pack_nodes([tree])
    targets = torch.tensor([2, 3, 4, 9, 9, 5, 6])
    for walk in (walk_given, accept_given):
        assert path_lists(walk(packed, targets)) == [([2, 4, 5, 6], [2, 5, 6])]


def test_a_placeholder_is_never_accepted() -> None:
    """-1 stands for a token that was never drafted; it matches not even a sampler's -1."""
    tree = [Node(-1, -1, 1, 0.0), Node(-1, 0, 2, 0.0)]
    packed = pack_nodes([tree, [Node(3, -1, 1, 0.0), Node(4, -1, 1, 0.0)]])
    targets = torch.tensor([-1, -1, -1, 4, 8, 9])
    for walk in (walk_given, accept_given):
        paths = walk(packed, targets)
        assert paths.num_accepted.tolist() == [0, 1]
        assert paths.rows[1, 0] == 2


def test_malformed_trees_neither_crash_nor_leave_their_request() -> None:
    """Parents out of order or out of range, repeated siblings, padding as tokens: the walk ends,
    and what it accepts are rows of the request itself that carry its outputs."""
    source = random.Random(4)
    accepted = {"walk": 0, "given": 0}
    for _ in range(300):
        sizes = [source.randint(1, 7) for _ in range(3)]
        num_rows = sum(sizes)
        packed = malformed_tree(
            sizes, _random_ints(source, num_rows, -1, 3), _random_ints(source, num_rows, -3, 8)
        )
        packed.parents[packed.cu_rows[:-1].long()] = -1
        targets = _random_ints(source, num_rows, 0, 3).long()
        for name, walk in (("walk", walk_given), ("given", accept_given)):
            for request, (outputs, rows) in enumerate(path_lists(walk(packed, targets))):
                assert len(outputs) == len(rows) + 1
                assert all(0 <= row < sizes[request] for row in rows)
                start = int(packed.cu_rows[request])
                assert [int(packed.tokens[start + row]) for row in rows] == outputs[:-1]
                accepted[name] += len(rows)
    assert min(accepted.values()) > 0


@pytest.mark.timeout(4)
@pytest.mark.parametrize("walk", [walk_given, accept_given])
def test_a_root_with_a_parent_does_not_trap_the_walk(
    walk: Callable[[SuperTree, torch.Tensor], AcceptedPaths],
) -> None:
    """Catches a walk that may turn back: it would never end, and the engine with it."""
    packed = malformed_tree(
        [2], torch.tensor([5, 6], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    )
    assert len(path_lists(walk(packed, torch.tensor([6, 5])))[0][1]) <= 1


def malformed_tree(sizes: list[int], tokens: torch.Tensor, parents: torch.Tensor) -> SuperTree:
    """A super-tree as given, of requests with ``sizes`` rows; the walk reads no more of it."""
    cu_rows = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
    return SuperTree(
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
        tokens=tokens,
        parents=parents,
        depths=torch.zeros_like(tokens),
        ancestors=torch.zeros(tokens.shape[0], 1, dtype=torch.int64),
        num_nodes=tokens.shape[0] - len(sizes),
    )


def _random_ints(source: random.Random, count: int, low: int, high: int) -> torch.Tensor:
    return torch.tensor([source.randint(low, high) for _ in range(count)], dtype=torch.int32)
