# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs: where, and under which name."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """The folder of fetched wheels, the demo, and cost curves."""
    if override := os.environ.get("VLLM_ECHO_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _home() / ".cache") / "vllm-echo"


def fingerprint(values: Any) -> str:
    """A short name for JSON values: the same for equal ones, in every process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _home() -> Path:
    """A container may run as a user that nobody knows, with no home folder."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())
