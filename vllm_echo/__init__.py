# SPDX-License-Identifier: Apache-2.0
"""Elastic tree speculative decoding (ECHO, arXiv:2604.09603) for vLLM 0.32.

vllm_echo/pipeline.py is the file to read first. Importing this package imports neither PyTorch
nor vLLM.
"""

from vllm_echo.version import __version__

__all__ = ["__version__"]
