# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: wall time per stage, summed, written to a file on request."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STAGE_TIMES_ENV = "VLLM_ECHO_STAGE_TIMES"
"""Path of a JSON file; when set, every worker sums its stage times and rewrites the file
every ``WRITE_EVERY`` steps: {"steps": n, "seconds": {stage: total}, "counts": {...}}."""

WRITE_EVERY = 20


class StageTimer:
    """Sums wall seconds per stage. Does nothing, cheaply, unless a path is given."""

    def __init__(self, path: Path | None):
        self._path = path
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._steps = 0

    @classmethod
    def from_environment(cls) -> "StageTimer":
        path = os.environ.get(STAGE_TIMES_ENV)
        return cls(Path(path) if path else None)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._path is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: str, amount: float) -> None:
        """Add ``amount`` to a counter that is written beside the times (nodes, tokens)."""
        if self._path is not None:
            self._counts[name] = self._counts.get(name, 0.0) + amount

    def end_step(self) -> None:
        if self._path is None:
            return
        self._steps += 1
        if self._steps % WRITE_EVERY == 0:
            report = {"steps": self._steps, "seconds": self._seconds, "counts": self._counts}
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(report))
            partial.replace(self._path)
