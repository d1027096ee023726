# SPDX-License-Identifier: Apache-2.0
"""Draft traces: labels, borders between requests, and files."""

import random
from pathlib import Path

import numpy as np
from hypothesis import given, settings

from tests.core.kit import randoms
from tests.core.traces import as_roots, assert_same, random_trace
from vllm_echo.core.trace import UNKNOWN, DraftTrace
from vllm_echo.reference import trace as reference

many = settings(max_examples=100, deadline=None, derandomize=True)


@many
@given(randoms)
def test_labels_are_those_of_the_obvious_walk(source: random.Random) -> None:
    """Catches a child that is judged without its parent, and an output's end that counts as no."""
    trace = random_trace(source)
    accepted, known = trace.labels()
    walked = reference.labels(as_roots(trace))
    assert accepted.tolist() == [[label[0] for label in row] for row in walked]
    assert known.tolist() == [[label[1] for label in row] for row in walked]


def test_random_traces_hold_every_kind_of_label() -> None:
    """The comparison above is worth what its examples exercise."""
    seen = set()
    for seed in range(40):
        trace = random_trace(random.Random(seed))
        accepted, known = trace.labels()
        drafted = np.isfinite(trace.log_probs)
        deep = trace.depths >= 3
        seen |= {"deep and accepted"} if (accepted & deep).any() else set()
        seen |= {"deep and refused"} if (known & ~accepted & deep).any() else set()
        seen |= {"drafted and unknown"} if (drafted & ~known).any() else set()
        seen |= {"not drafted"} if (~drafted).any() else set()
    assert len(seen) == 4


@many
@given(randoms)
def test_no_more_is_accepted_than_one_path_a_root(source: random.Random) -> None:
    """Siblings of one token may both count here; a path's depth may not exceed what was said."""
    trace = random_trace(source)
    accepted, known = trace.labels()
    assert not (accepted & ~known).any()
    said = (trace.continuations() != UNKNOWN).cumprod(axis=1).sum(axis=1)
    deepest = (accepted * trace.depths).max(axis=1)
    assert (deepest <= said).all()


def test_continuations_end_with_the_request() -> None:
    """Catches the next request's first token as the true next one of the last request's end."""
    trace = random_trace(random.Random(0), num_requests=2)
    trace = trace.select(np.zeros(5, dtype=np.int64))
    trace.requests[:] = [0, 0, 0, 1, 1]
    trace.positions[:] = [1, 2, 3, 4, 5]  # numbered on, as if it were one request
    trace.root_tokens[:] = [10, 11, 12, 13, 14]
    trace.depths[-1] = 3
    assert trace.continuations().tolist() == [
        [11, 12, UNKNOWN],
        [12, UNKNOWN, UNKNOWN],
        [UNKNOWN] * 3,
        [14, UNKNOWN, UNKNOWN],
        [UNKNOWN] * 3,
    ]


def test_a_missing_position_is_unknown_and_what_lies_behind_it_too() -> None:
    """Catches a gap that is closed: the token after next would be taken for the next."""
    trace = random_trace(random.Random(0)).select(np.zeros(3, dtype=np.int64))
    trace.requests[:] = 0
    trace.positions[:] = [1, 2, 4]
    trace.root_tokens[:] = [10, 11, 13]
    trace.depths[-1] = 2
    assert trace.continuations().tolist() == [[11, UNKNOWN], [UNKNOWN] * 2, [UNKNOWN] * 2]


def test_outputs_shorter_than_the_tree_is_deep_are_read() -> None:
    trace = random_trace(random.Random(0)).select(np.zeros(1, dtype=np.int64))
    trace.depths[-1] = 4
    assert trace.continuations().tolist() == [[UNKNOWN] * 4]
    nothing = trace.select(np.zeros(0, dtype=np.int64))
    assert nothing.continuations().shape == (0, 4)
    assert (nothing.num_roots, nothing.num_requests) == (0, 0)


@many
@given(randoms)
def test_joined_traces_keep_their_labels_apart(source: random.Random) -> None:
    """Catches two first requests that become one."""
    first = random_trace(source)
    second = first.select(np.arange(first.num_roots) >= first.num_roots // 2)
    joined = DraftTrace.join([first, second, first])
    assert joined.num_requests == 2 * first.num_requests + second.num_requests
    for place, part in enumerate(first.labels()):
        expected = np.concatenate([part, second.labels()[place], part])
        assert np.array_equal(joined.labels()[place], expected)
    assert np.array_equal(joined.context[: first.num_roots], first.context)


def test_one_trace_joined_is_itself() -> None:
    trace = random_trace(random.Random(2))
    assert_same(DraftTrace.join([trace]), trace)


@many
@given(randoms)
def test_a_whole_request_selected_keeps_its_labels(source: random.Random) -> None:
    trace = random_trace(source)
    chosen = trace.requests == source.randrange(trace.num_requests)
    accepted, known = trace.labels()
    selected = trace.select(chosen).labels()
    assert np.array_equal(selected[0], accepted[chosen])
    assert np.array_equal(selected[1], known[chosen])


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    for seed in range(5):
        trace = random_trace(random.Random(seed))
        path = str(tmp_path / f"{seed}.npz")
        trace.save(path)
        assert_same(DraftTrace.load(path), trace)


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Catches a half-written file that is left behind, and a name that grows a suffix: numpy
    appends .npz of its own accord."""
    path = tmp_path / "trace"
    trace = random_trace(random.Random(0))
    trace.save(path)
    trace.save(path)
    assert_same(DraftTrace.load(path), trace)
    assert list(tmp_path.iterdir()) == [path]


@many
@given(randoms)
def test_visited_roots_are_those_that_serving_would_reach(source: random.Random) -> None:
    """A step starts where the last one ended, and each request at its first root."""
    trace = random_trace(source)
    accepted = np.array([source.choice([0, 0, 1, 2, 9]) for _ in range(trace.num_roots)])
    expected, request, free = [], None, 0
    for row in range(trace.num_roots):
        if trace.requests[row] != request:
            request, free = trace.requests[row], row
        if row == free:
            expected.append(row)
            free = row + 1 + accepted[row]
    assert trace.visited(accepted).tolist() == expected
