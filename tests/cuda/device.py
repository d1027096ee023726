# SPDX-License-Identifier: Apache-2.0
"""The CUDA operators on a device, called as if they took CPU tensors."""

from collections.abc import Callable
from typing import Any

import torch

POISON = 0xA5
"""What freshly allocated memory holds: nothing may rely on it."""


def _moved(value: Any, device: str) -> Any:
    """Tensors keep their strides: a view is moved with all that it is a view of."""
    if isinstance(value, torch.Tensor):
        if value._base is None or value._base.numel() == 0:
            return value.to(device)
        base = value._base.to(device)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def poison_free_memory() -> None:
    """The next small allocations come from blocks that held ``POISON``."""
    blocks = [
        torch.full((size,), POISON, dtype=torch.uint8, device="cuda")
        for size in (512, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
        for _ in range(8)
    ]
    del blocks


class OnDevice:
    """``torch.ops.vllm_echo`` over copies on the device; what is written comes back."""

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            moved = [_moved(argument, "cuda") for argument in arguments]
            poison_free_memory()
            result = getattr(torch.ops.vllm_echo, op)(*moved)
            torch.cuda.synchronize()
            if op == "commit_kv":
                for cache, written in zip(arguments[0], moved[0], strict=True):
                    cache.copy_(written)
            return _moved(result, "cpu")

        return call
