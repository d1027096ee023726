# SPDX-License-Identifier: Apache-2.0
"""Every rank drafts its own trees: equal input must give equal trees in any process."""

import os
import subprocess
import sys
from pathlib import Path

from tests.core.print_decisions import digest_of_decisions

ROOT_FOLDER = Path(__file__).parents[2]


def test_another_process_decides_alike() -> None:
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
    assert result.stdout.strip() == digest_of_decisions()


def test_the_same_process_decides_alike_twice() -> None:
    assert digest_of_decisions() == digest_of_decisions()
