# SPDX-License-Identifier: Apache-2.0
"""Loggers that are heard: vLLM sets up "vllm" and what hangs below it, and nothing else."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.logger import _VllmLogger


def echo_logger(name: str) -> "_VllmLogger":
    """The logger of our module ``name``, at vLLM's level and in its form."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.{name}")
