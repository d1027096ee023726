# SPDX-License-Identifier: Apache-2.0
"""Trees of every size through ranking, pack and the tree table."""

import random

import pytest
import torch

from tests.core.kit import (
    CPU,
    SIZES,
    as_lists,
    bits_of,
    draft_trees,
    nodes_as_lists,
    pack_nodes,
    random_tree,
)
from vllm_echo import ops
from vllm_echo.core.decision import Rule
from vllm_echo.core.pack import pack_roots, pack_trees
from vllm_echo.core.tree import DraftTrees, SuperTree, TreeTable, num_words
from vllm_echo.reference import pack as reference
from vllm_echo.reference.schedule import Node
from vllm_echo.reference.schedule import take_best as reference_take_best

SHAPES = ["any", "chain", "wide"]


def assert_packed_like_the_reference(tree: SuperTree, trees: list[list[Node]]) -> None:
    requests = reference.pack_trees(trees)
    rows = [row for request in requests for row in request]
    assert tree.cu_rows.tolist() == [sum(map(len, requests[:r])) for r in range(len(requests) + 1)]
    assert tree.tokens.tolist() == [row.token for row in rows]
    assert tree.parents.tolist() == [row.parent for row in rows]
    assert tree.depths.tolist() == [row.depth for row in rows]
    assert [bits_of(words) for words in tree.ancestors] == [row.ancestors for row in rows]
    assert tree.ancestors.shape[1] == num_words(max([1, *map(len, requests)]))
    for field in (tree.cu_rows, tree.tokens, tree.parents, tree.depths):
        assert field.dtype == torch.int32


@pytest.mark.parametrize("num_nodes", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_every_size_pack(num_nodes: int, shape: str) -> None:
    """Catches the 64-node crash and bits that land in the neighbouring word."""
    tree = random_tree(random.Random(num_nodes), num_nodes, shape)
    assert_packed_like_the_reference(pack_nodes([tree]), [tree])


@pytest.mark.parametrize("num_nodes", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_nodes_of_every_size_are_taken(num_nodes: int, shape: str) -> None:
    """Catches renumbering that works only below some size."""
    source = random.Random(num_nodes)
    requests = [random_tree(source, 255, shape) for _ in range(3)]
    counts = [num_nodes, 255, 1]
    full = draft_trees(requests)
    scores = torch.tensor([[node.score for node in nodes] for nodes in requests])
    table = (full.tokens, full.parents, full.depths, scores)
    caps = torch.full((3,), 255, dtype=torch.int32)
    *ranked, _ = ops.order_trees(*table, caps, caps, torch.zeros(0), Rule.SHARES, True, 255)
    taken = DraftTrees(*ranked, torch.tensor(counts, dtype=torch.int32))
    taken.validate()
    best = [reference_take_best(nodes, n) for nodes, n in zip(requests, counts, strict=True)]
    assert as_lists(taken) == nodes_as_lists(best)
    assert_packed_like_the_reference(pack_trees(taken), best)


def test_ragged_batches_pack_request_after_request() -> None:
    """Catches offsets that hold for equal sizes only, and a root alone among trees."""
    source = random.Random(0)
    for _ in range(60):
        sizes = source.choices([0, 0, 1, 2, 3, 5, 8, 63, 64, 70], k=source.randint(1, 8))
        trees = [random_tree(source, size, source.choice(SHAPES)) for size in sizes]
        assert_packed_like_the_reference(pack_nodes(trees), trees)


@pytest.mark.parametrize("more", [0, 1, 70])
def test_padding_is_no_node(more: int) -> None:
    """Catches a number of nodes that is read off the rows of a forward of fixed size."""
    trees = [random_tree(random.Random(5), size) for size in (3, 0, 9)]
    tree = pack_trees(draft_trees(trees), max_rows=15 + more)
    assert tree.tokens.shape[0] == 15 + more
    assert tree.num_nodes == 12
    assert tree.cu_rows.tolist() == [0, 4, 5, 15]
    assert pack_trees(draft_trees(trees)).num_nodes == 12
    assert pack_roots(3, CPU).num_nodes == 0
    assert not tree.ancestors[15:].any()


def test_roots_alone_pack() -> None:
    assert_packed_like_the_reference(pack_nodes([[]]), [[]])
    assert_packed_like_the_reference(pack_nodes([[], [], []]), [[], [], []])


@pytest.mark.parametrize("num_requests", [0, 1, 3, 256])
def test_a_step_without_candidates_packs_like_any_other(num_requests: int) -> None:
    """Catches a shortcut for roots that differs from what the long way gives."""
    short = pack_roots(num_requests, CPU)
    long = pack_trees(draft_trees([[]] * num_requests))
    for field in ("cu_rows", "tokens", "parents", "depths", "ancestors"):
        mine, other = getattr(short, field), getattr(long, field)
        assert mine.dtype == other.dtype and mine.shape == other.shape, field
        assert mine.tolist() == other.tolist(), field


def test_no_request_packs_to_no_row() -> None:
    packed = pack_nodes([])
    assert packed.num_requests == 0
    assert packed.tokens.shape == (0,)


def test_roots_alone_pack_from_tables_without_columns() -> None:
    """A step in which nothing was scheduled may hand over [R, 0]."""
    assert_packed_like_the_reference(pack_trees(draft_trees([[], []], width=0)), [[], []])


def filled_table(trees: list[list[Node]], num_slots: int, max_nodes: int) -> TreeTable:
    table = TreeTable(num_slots, max_nodes, CPU)
    table.write(torch.arange(len(trees)), draft_trees(trees, max_nodes))
    return table


def read(table: TreeTable, slots: list[int], scheduled: list[list[int]]) -> DraftTrees:
    width = max([1, *map(len, scheduled)])
    rows = [tokens + [-1] * (width - len(tokens)) for tokens in scheduled]
    counts = [len(tokens) for tokens in scheduled]
    return table.read(
        torch.tensor(slots),
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )


def test_the_table_agrees_with_the_reference() -> None:
    """Catches trees of one slot met by another, whatever the engine schedules of them."""
    source = random.Random(1)
    kinds: set[str] = set()
    for _ in range(200):
        trees = [random_tree(source, source.randint(0, 9), vocab=20) for _ in range(5)]
        table = filled_table(trees, 6, 9)
        slots = source.sample(range(5), 3)
        scheduled = []
        for slot in slots:
            tokens = [node.token for node in trees[slot]]
            change = source.choice(["whole", "cut", "other token", "placeholder", "too many"])
            if change == "cut":
                tokens = tokens[: source.randint(0, len(tokens))]
            elif change == "other token" and tokens:
                tokens[source.randrange(len(tokens))] += 100
            elif change == "placeholder" and tokens:
                tokens[source.randrange(len(tokens))] = -1
            elif change == "too many" and len(tokens) < 9:
                tokens = tokens + [source.randrange(20)]
            scheduled.append(tokens)
            kinds.add(change)
        result = read(table, slots, scheduled)
        expected = [
            reference.read_tree(trees[slot], tokens)
            for slot, tokens in zip(slots, scheduled, strict=True)
        ]
        assert as_lists(result) == nodes_as_lists(expected)
        result.validate()
    assert len(kinds) == 5


TREE = [Node(7, -1, 1, 0.0), Node(8, -1, 1, 0.0), Node(9, 0, 2, 0.0), Node(7, 1, 2, 0.0)]
CHAIN = [(-1, 1), (0, 2), (1, 3), (2, 4), (3, 5)]


@pytest.mark.parametrize(
    "scheduled",
    [[7, 8, 9, 6], [8, 7, 9, 7], [7, -1, 9, 7], [-1, -1, -1, -1], [7, 8, 9, 7, 5], [1], [-1]],
)
def test_what_is_not_the_stored_tree_is_a_chain(scheduled: list[int]) -> None:
    """Catches a stale tree under a resumed request's tokens, and -1 placeholders in a tree."""
    result = read(filled_table([TREE], 2, 6), [0], [scheduled])
    assert [row[1:] for row in as_lists(result)[0]] == CHAIN[: len(scheduled)]
    assert [row[0] for row in as_lists(result)[0]] == scheduled


def test_a_step_that_is_skipped_finds_its_tree_again() -> None:
    table = filled_table([TREE, []], 2, 6)
    for _ in range(2):
        assert as_lists(read(table, [1], [[]])) == [[]]
        assert as_lists(read(table, [1, 0], [[], [7, 8, 9]])) == [[], nodes_as_lists([TREE[:3]])[0]]


def test_a_cleared_slot_forgets_its_tree_and_no_other() -> None:
    table = filled_table([TREE, TREE], 2, 6)
    table.clear(torch.tensor([0]))
    assert [row[1:] for row in as_lists(read(table, [0], [[7, 8]]))[0]] == CHAIN[:2]
    assert as_lists(read(table, [1], [[7, 8]])) == nodes_as_lists([TREE[:2]])
    assert as_lists(read(table, [0], [[]])) == [[]]


def test_a_new_tree_replaces_the_old_one_whole() -> None:
    table = filled_table([TREE], 1, 6)
    table.write(torch.tensor([0]), draft_trees([TREE[:1]], 6))
    assert [row[1:] for row in as_lists(read(table, [0], [[7, 8]]))[0]] == CHAIN[:2]


def test_growing_keeps_trees_and_adds_empty_slots() -> None:
    """Catches trees that move or vanish when more requests come than a batch holds."""
    table = filled_table([TREE, TREE[:2]], 2, 6)
    assert table.grow() == range(2, 4)
    assert table.grow() == range(4, 8)
    assert table.num_slots == 8
    result = read(table, [1, 0, 7], [[7, 8], [7, 8, 9, 7], []])
    assert as_lists(result) == nodes_as_lists([TREE[:2], TREE, []])
    assert [row[1:] for row in as_lists(read(table, [7], [[7, 0]]))[0]] == CHAIN[:2]
    table.write(torch.tensor([7]), draft_trees([TREE], 6))
    assert as_lists(read(table, [7], [[7, 8, 9, 7]])) == nodes_as_lists([TREE])
