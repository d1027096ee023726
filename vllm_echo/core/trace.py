# SPDX-License-Identifier: Apache-2.0
"""Draft traces: what the head drafted at every output position, and what the target then said.

A step that drafts for everybody and verifies nothing emits one token a request, so every
output position becomes a root once. The roots' own tokens, in order, are the true
continuation, and tell for every candidate whether verification would have accepted it,
also for those that no budget would have paid. One trace serves calibration and the simulator.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from vllm_echo.core.shape import TreeShape
from vllm_echo.core.tree import ROOT, CandidateTrees

UNKNOWN = -1
"""A continuation's token that was not seen: the output ended."""


@dataclass
class DraftTrace:
    """P roots of several requests, C candidates each, D layers. Rows of one request are
    consecutive, by ascending position."""

    requests: np.ndarray
    """[P] int32, which request."""
    positions: np.ndarray
    """[P] int32, output tokens up to and with the root, from 1."""
    context: np.ndarray
    """[P] int32, tokens before the root."""
    root_tokens: np.ndarray
    """[P] int32."""
    tokens: np.ndarray
    """[P, C] int32, candidates layer by layer."""
    parents: np.ndarray
    """[P, C] int32, candidate index or ROOT."""
    log_probs: np.ndarray
    """[P, C] float32, log q given the parent; -inf where nothing was drafted."""
    depths: np.ndarray
    """[C] int32, from 1."""

    @property
    def num_roots(self) -> int:
        return self.requests.shape[0]

    @property
    def num_requests(self) -> int:
        return np.unique(self.requests).shape[0]

    @property
    def max_depth(self) -> int:
        return int(self.depths[-1])

    def continuations(self) -> np.ndarray:
        """[P, D] int32: the target's next tokens after each root, or ``UNKNOWN``."""
        result = np.full((self.num_roots, self.max_depth), UNKNOWN, dtype=np.int32)
        for ahead in range(1, self.max_depth + 1):
            same = (self.requests[ahead:] == self.requests[:-ahead]) & (
                self.positions[ahead:] == self.positions[:-ahead] + ahead
            )
            result[:-ahead][same, ahead - 1] = self.root_tokens[ahead:][same]
        return result

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """(accepted, known), [P, C] bool each. A candidate is known when its whole path can be
        judged: an ancestor is known to fail, or the continuation reaches its depth."""
        truth = self.continuations()
        accepted = np.zeros(self.tokens.shape, dtype=bool)
        known = np.zeros(self.tokens.shape, dtype=bool)
        rows = np.arange(self.num_roots)
        for column, depth in enumerate(self.depths):
            parent = self.parents[:, column]
            is_root = parent == ROOT
            parent_accepted = is_root | accepted[rows, parent]
            parent_known = is_root | known[rows, parent]
            said = truth[:, depth - 1]
            known[:, column] = parent_known & (~parent_accepted | (said != UNKNOWN))
            accepted[:, column] = parent_accepted & (said == self.tokens[:, column])
        drafted = np.isfinite(self.log_probs)
        return accepted & drafted & known, known & drafted

    def visited(self, accepted: np.ndarray) -> np.ndarray:
        """[V] int64: the roots that serving would really draft from, when ``accepted`` [P] nodes
        are accepted at each: it starts where the tree before ended, in harder places than the
        average position."""
        ends = np.flatnonzero(np.diff(self.requests, append=-1)) + 1
        step = (accepted + 1).tolist()
        result = []
        row = 0
        for end in ends.tolist():
            while row < end:
                result.append(row)
                row += step[row]
            row = end
        return np.array(result, dtype=np.int64)

    def select(self, rows: np.ndarray) -> "DraftTrace":
        """The roots ``rows`` (a mask or indices, ascending); whole requests, or continuations
        are cut."""
        chosen = {
            f.name: getattr(self, f.name) if f.name == "depths" else getattr(self, f.name)[rows]
            for f in fields(self)
        }
        return DraftTrace(**chosen)

    def to_bytes(self) -> bytes:
        """An .npz file's content."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{f.name: getattr(self, f.name) for f in fields(self)})
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "DraftTrace":
        with np.load(io.BytesIO(content)) as arrays:
            return cls(**{f.name: arrays[f.name] for f in fields(cls)})

    def save(self, path: str | Path) -> None:
        """Write one .npz file, at once or not at all."""
        partial = Path(f"{path}.partial")
        partial.write_bytes(self.to_bytes())
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "DraftTrace":
        return cls.from_bytes(Path(path).read_bytes())

    @classmethod
    def join(cls, traces: Sequence["DraftTrace"]) -> "DraftTrace":
        """One after the other; requests are numbered anew."""
        first = 0
        numbered = []
        for trace in traces:
            numbered.append(trace.requests + first)
            first += int(trace.requests.max()) + 1 if trace.num_roots else 0
        joined = {
            f.name: np.concatenate([getattr(t, f.name) for t in traces])
            for f in fields(cls)
            if f.name not in ("depths", "requests")
        }
        return cls(requests=np.concatenate(numbered), depths=traces[0].depths, **joined)


class TraceRecorder:
    """Collects a trace while an engine runs; filled by the adapter."""

    def __init__(self, shape: TreeShape):
        widths = (1, *shape.frontier_widths)
        self._depths = np.repeat(
            np.arange(1, shape.max_depth + 1, dtype=np.int32), [w * shape.top_k for w in widths]
        )
        self._rows: dict[str, list[tuple]] = {}

    def add(
        self,
        keys: Sequence[str],
        positions: Sequence[int],
        contexts: Sequence[int],
        root_tokens: Sequence[int],
        candidates: CandidateTrees | None,
        places: Sequence[int],
    ) -> None:
        """One step: R requests by ``keys``, each with its root. ``places`` [R] is a request's
        row in ``candidates``, -1 where nothing was drafted for it."""
        drafted = None
        if candidates is not None:
            drafted = self._padded(candidates)
        for key, position, context, token, place in zip(
            keys, positions, contexts, root_tokens, places, strict=True
        ):
            row = None if drafted is None or place < 0 else tuple(part[place] for part in drafted)
            self._rows.setdefault(key, []).append((position, context, token, row))

    def _padded(self, trees: CandidateTrees) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Layers that nobody took part in are missing: fill them up."""
        parents = trees.parents.long()
        above = trees.scores.gather(1, parents.clamp(min=0)).masked_fill(parents == ROOT, 0.0)
        log_probs = torch.where(trees.scores.isfinite(), trees.scores - above, -torch.inf)
        missing = self._depths.shape[0] - log_probs.shape[1]
        return (
            np.pad(trees.tokens.numpy(), ((0, 0), (0, missing))),
            np.pad(trees.parents.numpy(), ((0, 0), (0, missing)), constant_values=ROOT),
            np.pad(log_probs.numpy(), ((0, 0), (0, missing)), constant_values=-np.inf),
        )

    def take(self) -> DraftTrace:
        """What was recorded since the last call; requests in the order of their first step."""
        traces = [self._trace(rows) for rows in self._rows.values()]
        self._rows = {}
        return DraftTrace.join(traces or [self._trace([])])

    def _trace(self, rows: list[tuple]) -> DraftTrace:
        empty = (
            np.zeros_like(self._depths),
            np.full_like(self._depths, ROOT),
            np.full(self._depths.shape, -np.inf, dtype=np.float32),
        )
        drafted = [empty if row[3] is None else row[3] for row in rows]
        return DraftTrace(
            requests=np.zeros(len(rows), dtype=np.int32),
            positions=np.array([row[0] for row in rows], dtype=np.int32),
            context=np.array([row[1] for row in rows], dtype=np.int32),
            root_tokens=np.array([row[2] for row in rows], dtype=np.int32),
            tokens=self._stacked([d[0] for d in drafted], np.int32),
            parents=self._stacked([d[1] for d in drafted], np.int32),
            log_probs=self._stacked([d[2] for d in drafted], np.float32),
            depths=self._depths,
        )

    def _stacked(self, rows: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.array(rows, dtype=dtype).reshape(len(rows), self._depths.shape[0])
