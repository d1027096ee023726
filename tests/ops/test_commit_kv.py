# SPDX-License-Identifier: Apache-2.0
"""Committing accepted paths, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.reference import commit as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_caches(
    layers: int, num_blocks: int, block_size: int, dtype: torch.dtype, head_dim: int = 32
) -> list[torch.Tensor]:
    """Random *bits*, NaN patterns among them: a copy through arithmetic would show."""
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    info = torch.iinfo(integer)
    shape = (layers, num_blocks, 3, block_size, 2 * head_dim)
    bits = torch.randint(info.min, info.max, shape, dtype=integer)
    return list(bits.view(dtype))


def bits(caches: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(caches))
    return stacked.view(torch.int32 if stacked.itemsize == 4 else torch.int16)


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(paths: list[list[int]]) -> torch.Tensor:
    width = max([0] + [len(path) for path in paths])
    return int32([path + [-1] * (width - len(path)) for path in paths]).reshape(len(paths), width)


def assert_commits_as_the_reference(
    caches: list[torch.Tensor],
    block_table: torch.Tensor,
    roots: list[int],
    paths: list[list[int]],
) -> None:
    arguments = (block_table, int32(roots), padded(paths), int32([len(path) for path in paths]))
    wanted = [cache.clone() for cache in caches]
    reference.commit_kv(wanted, *arguments)
    before = bits(caches)
    ops.commit_kv(caches, *arguments)
    assert torch.equal(bits(caches), bits(wanted))
    misplaced = any(path != list(range(1, len(path) + 1)) for path in paths)
    assert torch.equal(before, bits(caches)) != misplaced  # something really moved, or nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_path_moves_to_the_linear_prefix(block_size: int, dtype: torch.dtype) -> None:
    caches = random_caches(4, 5, block_size, dtype)
    table = torch.randperm(5)[:4].int().view(1, 4)
    assert_commits_as_the_reference(caches, table, [block_size - 2], [[1, 4, 5, block_size + 3]])


def test_overlapping_moves_keep_every_source() -> None:
    """Each source is the target of the next move but one: a wrong order loses a row."""
    caches = random_caches(2, 2, 32, torch.bfloat16)
    table = int32([[1, 0]])
    assert_commits_as_the_reference(caches, table, [20], [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])


def test_moves_cross_blocks_in_both_directions_of_the_table() -> None:
    caches = random_caches(3, 6, 16, torch.float32)
    table = int32([[5, 0, 3], [1, 4, 2]])
    assert_commits_as_the_reference(caches, table, [14, 3], [[3, 18, 30], [20, 29]])


def test_rows_in_place_and_empty_paths_move_nothing() -> None:
    caches = random_caches(2, 3, 16, torch.float16)
    table = int32([[0], [1], [2]])
    assert_commits_as_the_reference(caches, table, [0, 5, 2], [[1, 2, 3], [], [1]])


def test_other_requests_keep_their_bits() -> None:
    caches = random_caches(2, 4, 32, torch.bfloat16)
    before = bits(caches).clone()
    ops.commit_kv(caches, int32([[2], [0]]), int32([4, 0]), int32([[3], [-1]]), int32([1, 0]))
    after = bits(caches)
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert not torch.equal(after[:, 2], before[:, 2])


def test_padding_behind_the_path_is_ignored() -> None:
    """Adapters pad with -1; a path that was cut short may leave anything there."""
    caches = random_caches(1, 1, 32, torch.float32)
    twin = [caches[0].clone()]
    ops.commit_kv(caches, int32([[0]]), int32([0]), int32([[2, 999, -5]]), int32([1]))
    ops.commit_kv(twin, int32([[0]]), int32([0]), int32([[2]]), int32([1]))
    assert torch.equal(bits(caches), bits(twin))


def test_caches_may_be_slices_of_a_larger_buffer() -> None:
    """Engines allocate layers together: block strides need not be dense."""
    big = torch.stack(random_caches(2, 4, 16, torch.bfloat16), dim=1)
    layers = [big[:, 0], big[:, 1]]
    assert not layers[0].is_contiguous()
    assert_commits_as_the_reference(layers, int32([[3, 1]]), [10], [[2, 9, 11]])


def test_nothing_to_do_is_fine() -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    caches = random_caches(1, 1, 16, torch.float32)
    ops.commit_kv([], int32([[0]]), int32([0]), int32([[2]]), int32([1]))
    ops.commit_kv(caches, empty.view(0, 3), empty, empty.view(0, 0), empty)
    ops.commit_kv(caches, int32([[0]]), int32([0]), empty.view(1, 0), int32([0]))


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("path_rows", {"path_rows": [[0, 3]]}),
        ("path_rows", {"path_rows": [[3, 3]]}),
        ("path_rows", {"path_rows": [[4, 2]]}),
        ("path_lens", {"path_lens": [3]}),
        ("path_lens", {"path_lens": [-1]}),
        ("root_slots", {"root_slots": [-2]}),
        ("block_table", {"root_slots": [62]}),
        ("block_table", {"block_table": [[0, 7]], "root_slots": [30]}),
        ("block_table", {"block_table": [[0, -1]], "root_slots": [30]}),
    ],
)
def test_a_malformed_path_is_refused_before_anything_moves(tensor: str, change: dict) -> None:
    caches = random_caches(2, 2, 32, torch.bfloat16)
    before = bits(caches)
    arguments = {
        "block_table": [[0, 1]],
        "root_slots": [0],
        "path_rows": [[2, 3]],
        "path_lens": [2],
        **change,
    }
    good = (int32([[1, 0]]), int32([5]), int32([[2, 3]]), int32([2]))
    both = [
        torch.cat([first, int32(second)])
        for first, second in zip(good, arguments.values(), strict=True)
    ]
    with pytest.raises(ValueError, match=f"commit_kv: {tensor}"):
        ops.commit_kv(caches, *both)
    assert torch.equal(bits(caches), before)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([16, 32]), dtype=st.sampled_from(DTYPES))
def test_any_paths_match_the_reference(data: st.DataObject, block_size: int, dtype) -> None:
    num_requests = data.draw(st.integers(1, 4))
    blocks_each = 3
    slots = blocks_each * block_size
    roots, paths = [], []
    for _ in range(num_requests):
        root = data.draw(st.integers(0, slots - 1))
        rows = data.draw(st.sets(st.integers(1, max(1, slots - 1 - root)), max_size=9))
        roots.append(root)
        paths.append(sorted(rows) if root < slots - 1 else [])
    caches = random_caches(2, num_requests * blocks_each, block_size, dtype, head_dim=16)
    table = torch.randperm(num_requests * blocks_each).int().view(num_requests, blocks_each)
    assert_commits_as_the_reference(caches, table, roots, paths)
