# SPDX-License-Identifier: Apache-2.0
"""A good head that a test may spoil."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.fixture
def copy(head: Path, tmp_path: Path) -> Path:
    return shutil.copytree(head, tmp_path / "head")
