# SPDX-License-Identifier: Apache-2.0
"""A draft head that reads from a draft trace, and what the target said after every root."""

import numpy as np
import torch

from vllm_echo.core.draft import Frontier
from vllm_echo.core.trace import DraftTrace
from vllm_echo.core.tree import ROOT

NONE = -1


class RecordedTrees:
    """A trace prepared for look-ups: every output position is a root (row) of its own."""

    def __init__(self, trace: DraftTrace):
        self.trace = trace
        per_layer = np.bincount(trace.depths)[1:]
        self.top_k = int(per_layer[0])
        self.frontier_widths = tuple(int(n) // self.top_k for n in per_layer[1:])
        self.tokens = torch.from_numpy(trace.tokens)
        self.log_probs = torch.from_numpy(trace.log_probs)
        self.first_child = torch.from_numpy(_first_children(trace, self.top_k))
        self.truth = torch.from_numpy(trace.continuations())
        self.context = trace.context.astype(np.int64)
        starts = _request_starts(trace)
        ends = np.append(starts[1:], trace.num_roots) - 1
        lengths = ends - starts + 1
        self.starts = starts[lengths > 1]
        """Row of the first root of every request that has anything to decode."""
        self.num_left = np.repeat(ends, lengths) - np.arange(trace.num_roots)
        """[P] tokens that the request still emits after the root."""
        self.max_tokens = int(trace.positions.max())
        """The longest output, taken for the limit that all requests were given."""

    @property
    def max_depth(self) -> int:
        return self.trace.max_depth

    @property
    def num_nodes(self) -> int:
        """num_speculative_tokens of the trees that were recorded."""
        return sum(self.frontier_widths) + 1

    def chain_lengths(self) -> np.ndarray:
        """[P] accepted length of the likeliest child's chain, drafted to the last layer."""
        accepted, _ = self.trace.labels()
        rows = np.arange(self.trace.num_roots)
        node, alive = np.zeros_like(rows), np.ones(rows.shape, dtype=bool)
        lengths = np.zeros_like(rows)
        for _ in range(self.max_depth):
            alive &= (node >= 0) & accepted[rows, np.maximum(node, 0)]
            lengths += alive
            node = np.where(node >= 0, self.first_child.numpy()[rows, np.maximum(node, 0)], NONE)
        return lengths


def easiest_requests(trace: DraftTrace, share: float) -> DraftTrace:
    """The ``share`` of the requests whose chains were accepted longest: recorded data all the
    same, but chosen by outcome, so it says what easier traffic would do, not a better head."""
    lengths = RecordedTrees(trace).chain_lengths()
    requests, row_of = np.unique(trace.requests, return_inverse=True)
    mean = np.bincount(row_of, lengths) / np.bincount(row_of)
    kept = requests[np.argsort(-mean, kind="stable")[: max(1, round(share * len(requests)))]]
    return trace.select(np.isin(trace.requests, kept))


class ReplayHead:
    """``vllm_echo.core.draft.DraftHead`` for one step over R roots of a trace.

    A node whose children were not recorded (another frontier than the recorded one) gets none.
    """

    def __init__(self, recorded: RecordedTrees, rows: torch.Tensor):
        """``rows`` [R] int64: the requests' roots."""
        self._recorded = recorded
        self._rows = rows
        self._first = torch.zeros_like(rows)  # first child of every row of the last forward
        self._width = 0
        self.forwards: list[int] = []
        """Nodes of every draft forward so far."""
        self.num_unrecorded = 0
        """Drafted nodes among them whose children nobody recorded."""

    def expand_roots(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._width = width
        return self._children(self._rows, self._first, width)

    def expand(self, frontier: Frontier, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows[frontier.requests][:, None].expand(frontier.tokens.shape)
        first = self._first[frontier.parent_rows]
        child = frontier.columns % self._width
        node = torch.where((first >= 0) & (child < self._recorded.top_k), first + child, NONE)
        here = node.clamp(min=0)
        drafted = (node >= 0) & self._recorded.log_probs[rows, here].isfinite()
        first = torch.where(drafted, self._recorded.first_child[rows, here], NONE)
        self.num_unrecorded += int((drafted & (first < 0)).sum())
        self.forwards.append(frontier.tokens.numel())
        self._first, self._width = first.flatten(), width
        return self._children(rows, first, width)

    def _children(
        self, rows: torch.Tensor, first: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[*, width] each, for parents of any shape whose first child is candidate ``first``."""
        child = torch.arange(width)
        known = (first[..., None] >= 0) & (child < self._recorded.top_k)
        column = torch.where(known, first[..., None] + child, 0)
        tokens = self._recorded.tokens[rows[..., None], column]
        log_probs = self._recorded.log_probs[rows[..., None], column]
        return tokens.where(known, 0), log_probs.where(known, -torch.inf)


def _first_children(trace: DraftTrace, top_k: int) -> np.ndarray:
    """[P, C] int64: the candidate that is a candidate's likeliest child, or NONE.

    The children of an expanded node are ``top_k`` candidates side by side, best first.
    """
    num_roots, num_candidates = trace.tokens.shape
    shape = (num_roots, num_candidates // top_k, top_k)
    parents, log_probs = trace.parents.reshape(shape), trace.log_probs.reshape(shape)
    drafted = np.isfinite(log_probs[:, :, 0]) & (parents[:, :, 0] != ROOT)
    if (parents != parents[:, :, :1])[drafted].any():
        raise ValueError("the trace does not keep the children of a node side by side")
    rows, block = drafted.nonzero()
    first = np.full((num_roots, num_candidates), NONE, dtype=np.int64)
    first[rows, parents[rows, block, 0]] = block * top_k
    return first


def _request_starts(trace: DraftTrace) -> np.ndarray:
    """Rows of the first roots; every later root of a request must follow its predecessor."""
    new = np.append(True, trace.requests[1:] != trace.requests[:-1])
    if (~new[1:] & (np.diff(trace.positions) != 1)).any():
        raise ValueError("the trace has requests with missing positions; record it again")
    return new.nonzero()[0]
