# SPDX-License-Identifier: Apache-2.0
"""Cost curves that were measured at start-up, kept for the next one: same budget, no waiting."""

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_echo.cache import cache_dir, fingerprint
from vllm_echo.core.cost import CostCurve
from vllm_echo.errors import EchoConfigError
from vllm_echo.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_METHOD = 2
"""Counts up when `quick_profile` measures something else: earlier curves are not read then."""


def profile_path(vllm_config: "VllmConfig") -> Path:
    """Where the curve of this pair of models on this machine is kept."""
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    key = {
        "method": _METHOD,
        "target": [target.model, target.revision, str(target.dtype), target.quantization],
        "draft": [draft.model, draft.revision, str(draft.dtype), draft.quantization],
        "eager": target.enforce_eager,
        "ranks": vllm_config.parallel_config.world_size,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "processor": _processor(),
        "version": __version__,
    }
    return cache_dir() / "profiles" / f"{fingerprint(key)}.json"


def load_profile(path: Path) -> CostCurve | None:
    """The stored curve; None when there is none, or none that can be read."""
    try:
        return CostCurve.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, EchoConfigError):
        return None


def store_profile(path: Path, curve: CostCurve) -> None:
    """Keep ``curve``, at once or not at all: where nothing can be written the next start measures
    again."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(curve.to_dict()), encoding="utf-8")
        partial.replace(path)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())
