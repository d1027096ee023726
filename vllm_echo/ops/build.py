# SPDX-License-Identifier: Apache-2.0
"""What was built, and which instruction set runs."""

import torch

from vllm_echo.ops import library as library  # loads the operators


def build_info() -> dict[str, str]:
    """``simd``: what runs (portable, avx2, avx512 or avx512bf16); ``torch``, ``compiler``: what
    built it; ``cuda``: architectures that there are kernels for, or "none"."""
    return dict(item.split("=", 1) for item in torch.ops.vllm_echo.build_info().split(";"))


def set_simd_level(name: str) -> None:
    """Use the kernels of a lower instruction set; for tests and benchmarks.

    The process starts at the best level that the CPU offers. ValueError: not available here.
    """
    torch.ops.vllm_echo.set_simd_level(name)
