# SPDX-License-Identifier: Apache-2.0
"""The recorder that fills draft traces, and the policy that drafts for it."""

from pathlib import Path

import numpy as np
import pytest

from tests.core.steps import TableHead, draft_batch, random_children
from tests.core.traces import as_roots
from vllm_echo.core.config import EchoConfig, Gate
from vllm_echo.core.cost import StepLoad
from vllm_echo.core.draft import grow_trees
from vllm_echo.core.policies import make_recording_policy
from vllm_echo.core.schedule import schedule
from vllm_echo.core.shape import TreeShape
from vllm_echo.core.trace import UNKNOWN, DraftTrace, TraceRecorder
from vllm_echo.core.tree import CandidateTrees
from vllm_echo.reference import trace as reference
from vllm_echo.reference.draft import Limits

CONFIG = EchoConfig(
    policy="echo",
    k_max=32,
    num_speculative_tokens=8,
    max_depth=3,
    target_depth=3,
    top_k=3,
    gates=(),
)


def recorded(
    seed: int, limits: list[Limits], outputs: list[list[int]], missing: tuple[int, int] | None
) -> tuple[TraceRecorder, list[CandidateTrees]]:
    """A recorder after one step for each position of ``outputs``, and the steps' candidates;
    ``missing`` (request, position) has no row in its step's."""
    policy = make_recording_policy(CONFIG)
    recorder = TraceRecorder(policy.shape)
    steps = []
    for position in range(1, len(outputs[0]) + 1):
        places = [-1 if (r, position) == missing else r for r in range(len(outputs))]
        head = TableHead(random_children(seed + position, "distinct"), len(limits), policy)
        load = StepLoad(len(limits))
        decision = policy.decide(load, policy.offer(load))
        candidates, growth = grow_trees(head, draft_batch(limits), decision)
        trees = schedule(candidates, growth.limits, decision, CONFIG.num_speculative_tokens)
        assert not trees.num_nodes.any(), "a recording step verifies nothing"
        recorder.add(
            keys=[f"request {r}" for r in range(len(outputs))],
            positions=[position] * len(outputs),
            contexts=[100 + position] * len(outputs),
            root_tokens=[output[position - 1] for output in outputs],
            candidates=candidates,
            places=places,
        )
        steps.append(candidates)
    return recorder, steps


def test_a_recorder_keeps_what_was_drafted_for_whom() -> None:
    """Catches rows of one request under another's name, and scores of paths for those of nodes."""
    outputs = [[1, 2, 3], [4, 5, 6]]
    recorder, steps = recorded(0, [Limits(8)] * 2, outputs, missing=None)
    whole = recorder.take()
    assert whole.requests.tolist() == [0, 0, 0, 1, 1, 1]
    for r in range(2):
        trace = whole.select(whole.requests == r)
        assert trace.root_tokens.tolist() == outputs[r]
        assert trace.positions.tolist() == [1, 2, 3]
        assert trace.context.tolist() == [101, 102, 103]
        assert trace.depths.tolist() == steps[0].depths[r].tolist()
        for position, candidates in enumerate(steps, start=1):
            row = position - 1
            assert trace.tokens[row].tolist() == candidates.tokens[r].tolist()
            assert trace.parents[row].tolist() == candidates.parents[r].tolist()
            children = random_children(position, "distinct")
            for node in as_roots(trace)[row].nodes:
                assert node is not None
                path = reference.path_of(as_roots(trace)[row].nodes, node)
                said = dict(children(r, tuple(path[:-1])))[node.token]
                assert node.score == pytest.approx(said, abs=1e-5)


@pytest.mark.parametrize(
    ("limits", "layers"),
    [
        ([Limits(8), Limits(8)], [3, 3]),
        ([Limits(8), Limits(2)], [3, 2]),
        ([Limits(1), Limits(2)], [1, 2]),
        ([Limits(8, can_expand=False), Limits(0)], [1, 0]),
    ],
)
def test_layers_that_nobody_took_part_in_are_filled_up(
    limits: list[Limits], layers: list[int]
) -> None:
    """Catches steps of fewer layers that do not fit beside the others."""
    recorder, _ = recorded(0, limits, [[1, 2, 3], [4, 5, 6]], missing=None)
    whole = recorder.take()
    for r, deepest in enumerate(layers):
        trace = whole.select(whole.requests == r)
        assert trace.tokens.shape == trace.parents.shape == trace.log_probs.shape == (3, 3 + 9 + 9)
        drafted = np.isfinite(trace.log_probs)
        assert (drafted == (trace.depths <= deepest)).all()
        assert not trace.labels()[1][~drafted].any()


def test_a_request_that_nothing_was_drafted_for_still_tells_what_came_next() -> None:
    """Its root is the truth for the roots before it."""
    recorder, _ = recorded(0, [Limits(8)] * 2, [[1, 2, 3], [4, 5, 6]], missing=(1, 2))
    trace = recorder.take()
    whole, holed = (trace.select(trace.requests == r) for r in range(2))
    assert np.isfinite(whole.log_probs).all()
    assert np.isfinite(holed.log_probs).all(axis=1).tolist() == [True, False, True]
    assert not np.isfinite(holed.log_probs[1]).any()
    assert holed.continuations()[0].tolist() == [5, 6, UNKNOWN]


def test_steps_without_drafts_record_their_roots() -> None:
    recorder = TraceRecorder(TreeShape(2, 2, (2,)))
    for position in (1, 2):
        recorder.add(["a"], [position], [10], [7 + position], None, [-1])
    trace = recorder.take()
    assert trace.root_tokens.tolist() == [8, 9]
    assert trace.depths.tolist() == [1, 1, 2, 2, 2, 2]
    assert not np.isfinite(trace.log_probs).any()
    assert not trace.labels()[1].any()


def test_what_was_taken_is_not_given_again() -> None:
    """Catches roots that count twice in a calibration."""
    recorder, _ = recorded(0, [Limits(8)], [[1, 2]], missing=None)
    assert recorder.take().num_roots == 2
    nothing = recorder.take()
    assert (nothing.num_roots, nothing.tokens.shape, nothing.max_depth) == (0, (0, 3 + 9 + 9), 3)
    recorder.add(["request 0"], [3], [103], [9], None, [-1])
    assert recorder.take().positions.tolist() == [3]


def test_recorded_traces_save_and_label_like_any_other(tmp_path: Path) -> None:
    """From the recorder through a file to labels, against the obvious walk."""
    children = random_children(1, "distinct")  # the first step's
    best = [max(children(r, ()), key=lambda child: child[1])[0] for r in range(3)]
    outputs = [[0, best[r], 2, 3] for r in range(3)]
    recorder, _ = recorded(0, [Limits(8)] * 3, outputs, missing=(0, 3))
    recorder.take().save(tmp_path / "trace.npz")
    trace = DraftTrace.load(tmp_path / "trace.npz")
    accepted, known = trace.labels()
    walked = reference.labels(as_roots(trace))
    assert accepted.tolist() == [[label[0] for label in row] for row in walked]
    assert known.tolist() == [[label[1] for label in row] for row in walked]
    assert accepted[trace.positions == 1].any(axis=1).all(), "each first root's best child is right"


def test_recording_drafts_in_full_for_everybody() -> None:
    """Catches gates or a budget in a trace: what they leave out could never be judged."""
    gates = (Gate(0, 1.0),)
    config = EchoConfig(
        policy="echo", num_speculative_tokens=8, max_depth=3, target_depth=2, gates=gates, k_max=1
    )
    policy = make_recording_policy(config)
    assert policy.shape == TreeShape(3, 3, (3, 3))
    head = TableHead(random_children(0, "plain"), 5, policy)
    load = StepLoad(5)
    decision = policy.decide(load, policy.offer(load))
    batch = draft_batch([Limits(8)] * 5)
    candidates, growth = grow_trees(head, batch, decision)
    assert head.forwards == [[0, 1, 2, 3, 4]] * 2
    assert candidates.scores.isfinite().all()
    assert schedule(candidates, growth.limits, decision, 8).num_nodes.tolist() == [0] * 5
