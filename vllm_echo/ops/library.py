# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled operators; the other modules are how to call them."""

import importlib
import logging
from typing import Any

import torch

try:
    importlib.import_module("vllm_echo._C")  # loading it registers torch.ops.vllm_echo
except ImportError as error:
    raise ImportError(
        "vllm_echo's compiled operators are missing or do not load into this PyTorch "
        f"({torch.__version__}): {error}. Build them with `make build`, or with "
        "`pip install -e . --no-deps --no-build-isolation` in the source tree."
    ) from error


CUDA_OPERATORS = frozenset(
    {
        "pack_trees",
        "accept_paths",
        "accept_greedy",
        "accept_sampled",
        "commit_kv",
        "schedule_budget",
        "tree_part_attention",
    }
)
"""Operators that have a CUDA implementation."""

ON_A_CPU = {
    "schedule_budget": "order_trees and admit_nodes",
    "tree_part_attention": "tree_attention",
}
"""What to call on a CPU instead of those that run on a CUDA device only."""

HAS_CUDA = "cuda=none" not in torch.ops.vllm_echo.build_info()

if torch.version.cuda is not None and torch.cuda.is_available() and not HAS_CUDA:
    logging.getLogger(__name__).warning(
        "vllm_echo's operators were built without CUDA: they run on the CPU only, though this "
        "machine has a CUDA device. Build them with ECHO_BUILD_CUDA=1 in the environment, "
        "`pip install -e . --no-deps --no-build-isolation` in the source tree."
    )


def require_devices(op: str, arguments: tuple[object, ...]) -> None:
    """TypeError, naming the tensor, unless all tensors among ``arguments`` are on one device that
    ``op`` runs on."""
    schema = getattr(torch.ops.vllm_echo, op).default._schema
    named = [
        (argument.name, item)
        for argument, value in zip(schema.arguments, arguments, strict=True)
        for item in (value if isinstance(value, list | tuple) else [value])
        if isinstance(item, torch.Tensor)
    ]
    on_cuda = op in CUDA_OPERATORS and HAS_CUDA and any(item.is_cuda for _, item in named)
    device = next((item.device for _, item in named if item.is_cuda), None)
    if op in ON_A_CPU and not on_cuda:
        name, first = named[0]
        raise TypeError(
            f"{op}: {name} must be on a CUDA device, got {first.device}, and this build must have "
            f"CUDA operators (it has {'some' if HAS_CUDA else 'none'}); on a CPU use {ON_A_CPU[op]}"
        )
    for name, item in named:
        if on_cuda and item.device != device:
            raise TypeError(f"{op}: {name} must be on {device}, got {item.device}")
        if not on_cuda and not item.is_cpu:
            raise TypeError(
                f"{op}: {name} must be on the CPU, got {item.device}"
                + ("" if HAS_CUDA else "; this build has no CUDA operators")
            )


def call(op: str, *arguments: object) -> Any:
    """``torch.ops.vllm_echo``'s ``op``; a wrong device is refused by the tensor's name."""
    try:
        return getattr(torch.ops.vllm_echo, op)(*arguments)
    except (NotImplementedError, ValueError) as error:  # no kernel there, or devices are mixed
        try:
            require_devices(op, arguments)
        except TypeError as refusal:
            raise refusal from error
        raise
