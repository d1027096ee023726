# SPDX-License-Identifier: Apache-2.0
"""Cost curves that were measured at start-up, kept for the next one: same budget, no waiting."""

import json
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache

from vllm_echo.cache import cache_dir, fingerprint
from vllm_echo.core.cost import CostCurve
from vllm_echo.errors import EchoConfigError
from vllm_echo.version import __version__

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


_METHOD = 3
"""Counts up when `quick_profile` measures something else: earlier curves are not read then."""
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.pt")


def profile_path(vllm_config: "VllmConfig") -> Path:
    """Where the curve of this pair of models on this machine is kept, under a name of everything
    that changes speed. For a worker that has its threads."""
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    key = {
        "method": _METHOD,
        "target": _model_key(target),
        "draft": _model_key(draft),
        "eager": [target.enforce_eager, vllm_config.speculative_config.enforce_eager],
        "compiled": str(vllm_config.compilation_config.mode),
        "rows": vllm_config.scheduler_config.max_num_batched_tokens,
        "ranks": vllm_config.parallel_config.world_size,
        "threads": torch.get_num_threads(),
        "preloaded": _preloaded(),
        "processor": _processor(),
        "version": __version__,
    }
    return cache_dir() / "profiles" / f"{fingerprint(key)}.json"


def _model_key(model: "ModelConfig") -> list[Any]:
    return [model.model, model.revision, str(model.dtype), model.quantization, _files(model)]


def _files(model: "ModelConfig") -> list[list[Any]]:
    """Name, size and time of a model's files: one that was trained again in its place is another
    model. A model of a hub is looked for among the files that are here already."""
    folder = Path(model.model)
    if not folder.is_dir():
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    files = sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern))
    stats = [(path.name, path.stat()) for path in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _preloaded() -> list[str]:
    """Names of the libraries that stand before all others: OpenMP's, an allocator's."""
    return sorted(Path(name).name for name in re.split("[: ]+", os.environ.get("LD_PRELOAD", "")))


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
