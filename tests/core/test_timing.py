# SPDX-License-Identifier: Apache-2.0
"""Stage times in a file, and what a machine with others on it says of a time."""

import json
import logging
from pathlib import Path

from tests.heard import heard
from vllm_echo.core.timing import STAGE_TIMES_ENV, WRITE_EVERY, StageTimer, spread


def run_steps(timer: StageTimer, count: int) -> None:
    for _ in range(count):
        with timer.stage("verify"):
            pass
        timer.count("nodes", 2)
        timer.end_step()


def test_a_file_holds_the_sums(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    run_steps(StageTimer(path), WRITE_EVERY)
    content = json.loads(path.read_text())
    assert content["steps"] == WRITE_EVERY
    assert content["counts"] == {"nodes": 2.0 * WRITE_EVERY}
    assert content["seconds"]["verify"] > 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_told_once_and_ends_no_step(tmp_path: Path) -> None:
    """Catches a server that dies of its own stop-watch, twenty steps after the start."""
    path = tmp_path / "no such folder" / "stages.json"
    timer = StageTimer(path)
    with heard("vllm.vllm_echo.core.timing", logging.WARNING) as lines:
        run_steps(timer, 3 * WRITE_EVERY)
    (line,) = lines
    assert STAGE_TIMES_ENV in line and str(path) in line


def test_a_step_is_told_when_it_ends_and_begins_anew() -> None:
    """Times of one step that are found in the next one would make every step slow."""
    timer = StageTimer(None)
    with timer.stage("draft"):
        timer.count("nodes", 2)
    first, second = timer.end_step(), timer.end_step()
    assert first["seconds"]["draft"] > 0
    assert first["counts"] == {"nodes": 2}
    assert second["seconds"] == second["counts"] == {}
    assert 0 < second["period"] < 1


def test_spread_is_that_of_the_quartiles() -> None:
    assert spread([1.0, 1.0, 1.0, 1.0]) == 1.0
    assert spread([4.0, 2.0, 3.0, 1.0]) == 2.0
