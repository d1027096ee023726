# SPDX-License-Identifier: Apache-2.0
"""The tensors of a head in a local folder: from the files that vLLM's loader would take.

They are mapped into memory, not read: names, shapes and the few values that somebody looks at
cost milliseconds, whatever the head's size.
"""

import json
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm_echo.errors import EchoConfigError

# The first pattern that finds something decides, as in vLLM's `DefaultModelLoader`.
PATTERNS = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
Tensors = dict[str, torch.Tensor]


def read_tensors(where: str, folder: Path) -> Tensors:
    """Name -> tensor of all weights in ``folder``."""
    tensors: Tensors = {}
    files: dict[str, str] = {}
    for path in _weight_files(where, folder):
        for name, tensor in _read_file(where, path).items():
            if name in tensors:
                raise EchoConfigError(
                    f"{where} has {name} twice, in {files[name]} and in {path.name}; remove the "
                    "file that does not belong there"
                )
            tensors[name], files[name] = tensor, path.name
    return tensors


def _weight_files(where: str, folder: Path) -> list[Path]:
    for pattern in PATTERNS:
        found = sorted(folder.glob(pattern))
        if not found:
            continue
        if pattern.endswith(".safetensors"):
            prefix = "consolidated" if pattern.startswith("consolidated") else "model"
            return _listed_files(where, folder / f"{prefix}.safetensors.index.json", found)
        weights = [path for path in found if not path.name.endswith(NOT_WEIGHTS)]
        if weights:
            return weights
        break
    raise EchoConfigError(
        f"{where} has a config.json but no weights that vLLM would take (*.safetensors, or else "
        "*.bin, or else *.pt); copy the whole folder, or download the head again"
    )


def _listed_files(where: str, index: Path, found: list[Path]) -> list[Path]:
    """Of the safetensors files ``found`` those that ``index`` names; all where there is none."""
    if not index.is_file():
        return found
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise EchoConfigError(
            f"{where} has a broken {index.name} (no weight_map); fetch it again"
        ) from None
    missing = sorted(names - {path.name for path in found})
    if missing:
        raise EchoConfigError(
            f"{where} lacks the file {missing[0]} that its {index.name} names; fetch it again"
        )
    return [path for path in found if path.name in names]


def _read_file(where: str, path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Only files of the newer kind, which is a zip archive, can be mapped.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EchoConfigError(
            f"{where} has a broken file {path.name} ({reason}); fetch it again"
        ) from None
    if not isinstance(state, dict):
        raise EchoConfigError(
            f"{where} has a {path.name} that holds a {type(state).__name__}, not tensors by name; "
            "save the head's state_dict()"
        )
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise EchoConfigError(
                f"{where} has a {path.name} whose entry {name!r} is a {type(value).__name__}, no "
                "tensor; save the head's state_dict() and nothing else"
            )
    return state
