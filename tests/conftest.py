# SPDX-License-Identifier: Apache-2.0
"""Settings every test process needs before torch or vLLM is imported, and the model pairs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serving import tiny

    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serving import tiny

    return tiny.make_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def demo() -> dict[str, str]:
    """Folders of the demo pair: "model", "draft", and the file "speculative_config"."""
    command = [sys.executable, "-m", "vllm_echo.cli.main", "demo"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])
