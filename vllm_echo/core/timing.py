# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: wall time per stage, summed into a file or kept step by step."""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")  # what vLLM has set up is heard

STAGE_TIMES_ENV = "VLLM_ECHO_STAGE_TIMES"
"""Path of a JSON file; when set, every worker sums its stage times and rewrites the file
every ``WRITE_EVERY`` steps: {"steps": n, "seconds": {stage: total}, "counts": {...}}."""

WRITE_EVERY = 20

NOISY = 1.25
"""``spread`` of step times from which a machine counts as too busy to be measured."""


def lower_quartile(times: Sequence[float]) -> float:
    """What counts of times that others on the machine can only lengthen."""
    return sorted(times)[len(times) // 4]


def spread(times: Sequence[float]) -> float:
    """Upper over lower quartile: 1 on a machine that does nothing else."""
    ordered = sorted(times)
    return ordered[3 * len(ordered) // 4] / ordered[len(ordered) // 4]


def waited_seconds() -> float:
    """Seconds that the calling thread was ready to run and had no core, since it began; 0 where the
    system does not say."""
    try:
        words = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except OSError:
        return 0.0
    return int(words[1]) / 1e9


class StageTimer:
    """Wall seconds per stage of a step; a microsecond each. Summed where somebody wants that."""

    def __init__(self, path: Path | None):
        self._path = path
        self._log: list[dict[str, Any]] | None = None
        self._totals: dict[str, dict[str, float]] = {"seconds": {}, "counts": {}}
        self._step: dict[str, dict[str, float]] = {"seconds": {}, "counts": {}}
        self._steps = 0
        self._ended = 0.0

    @classmethod
    def from_environment(cls) -> "StageTimer":
        path = os.environ.get(STAGE_TIMES_ENV)
        return cls(Path(path) if path else None)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since(name, start)

    def since(self, name: str, start: float) -> None:
        """Add what has passed since ``start`` (``time.perf_counter``): a stage whose two ends are
        in different functions."""
        seconds = self._step["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, name: str, amount: float) -> None:
        """Add ``amount`` to a counter that is written beside the times (nodes, tokens)."""
        counts = self._step["counts"]
        counts[name] = counts.get(name, 0.0) + amount

    def end_step(self) -> dict[str, Any]:
        """One step is over: {"period": seconds from the last one's end, "seconds": {stage:
        seconds}, "counts": {...}}. It is added up and kept where that is wanted, and the file is
        written when it is due."""
        now = time.perf_counter()
        step, self._step = self._step, {"seconds": {}, "counts": {}}
        record = {"period": now - self._ended, **step}
        self._ended = now
        if self._log is not None:
            self._log.append(record)
        if self._path is not None:
            self._sum_up(step, self._path)
        return record

    def _sum_up(self, step: dict[str, dict[str, float]], path: Path) -> None:
        for part, values in step.items():
            for name, value in values.items():
                self._totals[part][name] = self._totals[part].get(name, 0.0) + value
        self._steps += 1
        if self._steps % WRITE_EVERY == 0:
            self._write(path)

    def _write(self, path: Path) -> None:
        """Several workers may write the same file: each a whole one, and the last one's stays."""
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps({"steps": self._steps, **self._totals}))
            partial.replace(path)
        except OSError as error:
            self._path = None
            logger.warning(
                "%s: %s cannot be written (%s); no stage times are kept",
                STAGE_TIMES_ENV,
                path,
                error.strerror,
            )

    def start_log(self) -> None:
        """Keep every step from now on, for ``take_log``."""
        self._log = []

    def take_log(self) -> list[dict[str, Any]]:
        """The steps since ``start_log``, as ``end_step`` returned them. Logging stops."""
        log, self._log = self._log or [], None
        return log
