# SPDX-License-Identifier: Apache-2.0
"""Every rank drafts its own trees: equal input must give equal trees in any process."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.core.print_decisions import digests_of_decisions
from vllm_echo.core.config import POLICIES

ROOT_FOLDER = Path(__file__).parents[2]


def test_another_process_decides_alike_by_every_policy() -> None:
    """Catches ties broken by a set's order, by a thread count or by an unstable sort: ranks that
    disagree about a tree deadlock or accept different tokens."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.core.print_decisions"],
        cwd=ROOT_FOLDER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == digests_of_decisions()


def test_the_same_process_decides_alike_twice() -> None:
    digests = digests_of_decisions()
    assert digests == digests_of_decisions()
    assert len(set(digests.values())) == len(POLICIES), "two policies are one"
