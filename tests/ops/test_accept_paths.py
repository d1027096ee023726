# SPDX-License-Identifier: Apache-2.0
"""The greedy walk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_echo import ops
from vllm_echo.reference import accept as reference


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def accept(
    requests: list[tuple[list[int], list[int], list[int]]], dtype: torch.dtype = torch.int64
) -> tuple[list, list, list]:
    """(target tokens, tokens, parents) of each request -> the operator's results as lists."""
    targets, tokens, parents = (
        [value for request in requests for value in request[i]] for i in range(3)
    )
    cu_rows = int32([0] + [len(request[2]) for request in requests]).cumsum(0).int()
    arguments = (torch.tensor(targets, dtype=dtype), cu_rows, int32(tokens), int32(parents))
    got = ops.accept_paths(*arguments)
    for mine, wanted in zip(got, reference.accept_paths(*arguments), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.dtype == torch.int32
    return tuple(tensor.tolist() for tensor in got)


#        0 (root)
#      1     2        tokens 11, 12
#    3   4     5      tokens 13, 14, 15
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [10, 11, 12, 13, 14, 15]


def test_the_walk_steps_into_the_child_that_matches() -> None:
    targets = [11, 14, 0, 0, 77, 0]
    assert accept([(targets, TOKENS, PARENTS)]) == (
        [[11, 14, 77, -1, -1, -1]],
        [[1, 4, -1, -1, -1]],
        [2],
    )


def test_a_later_sibling_is_found() -> None:
    targets = [12, 0, 15, 0, 0, 99]
    tokens, rows, accepted = accept([(targets, TOKENS, PARENTS)])
    assert rows[0][:2] == [2, 5]
    assert tokens[0][:3] == [12, 15, 99]
    assert accepted == [2]


def test_no_match_gives_the_targets_token_alone() -> None:
    tokens, rows, accepted = accept([([5, 0, 0, 0, 0, 0], TOKENS, PARENTS)])
    assert (tokens[0][:2], rows[0][0], accepted) == ([5, -1], -1, [0])


def test_a_matching_token_under_another_parent_is_not_taken() -> None:
    """Row 5 carries the wanted token but hangs under row 2."""
    tokens, _, accepted = accept([([11, 15, 0, 0, 0, 0], TOKENS, PARENTS)])
    assert (tokens[0][:3], accepted) == ([11, 15, -1], [1])


def test_the_roots_own_token_is_ignored() -> None:
    assert accept([([10], [10], [-1])]) == ([[10]], [[]], [0])


def test_of_two_equal_siblings_the_first_wins() -> None:
    targets = [8, 9, 9, 1, 2]
    _, rows, _ = accept([(targets, [0, 8, 8, 9, 9], [-1, 0, 0, 2, 1])])
    assert rows == [[1, 4, -1, -1]]


def test_ragged_batches_and_empty_requests() -> None:
    chain = ([1, 2, 3], [0, 1, 2], [-1, 0, 1])
    empty = ([], [], [])
    root_only = ([6], [0], [-1])
    tokens, rows, accepted = accept([empty, chain, root_only, empty])
    assert tokens == [[-1, -1, -1], [1, 2, 3], [6, -1, -1], [-1, -1, -1]]
    assert rows == [[-1, -1], [1, 2], [-1, -1], [-1, -1]]
    assert accepted == [0, 2, 0, 0]


def test_no_request_at_all() -> None:
    out_tokens, path_rows, num_accepted = ops.accept_paths(
        torch.zeros(0, dtype=torch.int64), int32([0]), int32([]), int32([])
    )
    assert (out_tokens.shape, path_rows.shape, num_accepted.shape) == ((0, 1), (0, 0), (0,))


def test_malformed_parents_accept_nothing_and_leave_the_others_alone() -> None:
    good = ([1, 2], [0, 1], [-1, 0])
    for bad_parents in ([-1, 1], [-1, 7], [-1, -2], [0, 0], [2**31 - 1, 0], [-(2**31), 0]):
        _, rows, accepted = accept([good, ([1, 2], [0, 1], bad_parents), good])
        assert accepted == [1, 0, 1]
        assert rows == [[1], [-1], [1]]


def test_a_detached_node_is_never_reached() -> None:
    _, rows, accepted = accept([([1, 1, 1], [0, 1, 1], [-1, -1, 0])])
    assert (rows, accepted) == ([[2, -1]], [1])


def test_padding_tokens_never_match_even_a_padded_target() -> None:
    _, _, accepted = accept([([-1, 3], [0, -1], [-1, 0])])
    assert accepted == [0]


def test_both_widths_of_target_tokens() -> None:
    request = ([11, 14, 0, 0, 77, 0], TOKENS, PARENTS)
    assert accept([request], torch.int32) == accept([request], torch.int64)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_any_forest_matches_the_reference(data: st.DataObject, dtype: torch.dtype) -> None:
    """A vocabulary of three makes long paths and equal siblings frequent."""
    requests = []
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.integers(0, 12))
        token = st.lists(st.integers(-1, 2), min_size=size, max_size=size)
        parents = [data.draw(st.integers(-1, row)) for row in range(size)]
        if size and data.draw(st.booleans()):
            parents = [-1] + [max(0, min(p, row)) for row, p in enumerate(parents[1:])]
        requests.append((data.draw(token), data.draw(token), parents))
    accept(requests, dtype)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), max_nodes=st.integers(0, 12))
def test_paths_longer_than_asked_for_are_cut(data: st.DataObject, max_nodes: int) -> None:
    """What is left is the beginning of the whole path and the target's token there."""
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    tokens, parents, targets = [], [], []
    for size in sizes:  # chains that are accepted for a while
        tokens += range(size)
        parents += range(-1, size - 1)
        stop = data.draw(st.integers(0, size))
        targets += [row + 1 if row < stop else 77 for row in range(size)]
    cu_rows = torch.tensor([0, *sizes]).cumsum(0).int()
    arguments = (torch.tensor(targets).long(), cu_rows, int32(tokens), int32(parents))
    whole, whole_rows, counts = ops.accept_paths(*arguments)
    out, rows, accepted = ops.accept_paths(*arguments, max_nodes)
    assert out.shape == (len(sizes), max_nodes + 1) and rows.shape == (len(sizes), max_nodes)
    assert torch.equal(accepted, counts.clamp(max=max_nodes))
    for r, count in enumerate(accepted.tolist()):
        kept = min(count + 1, sizes[r])
        assert out[r, :kept].tolist() == whole[r, :kept].tolist()
        assert (out[r, kept:] == -1).all() and (rows[r, count:] == -1).all()
        assert rows[r, :count].tolist() == whole_rows[r, :count].tolist()


def test_no_negative_room_for_a_path() -> None:
    nothing = int32([])
    with pytest.raises(ValueError, match="max_nodes must not be negative, got -1"):
        ops.accept_paths(nothing.long(), int32([0]), nothing, nothing, -1)
