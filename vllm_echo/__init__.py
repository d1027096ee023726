# SPDX-License-Identifier: Apache-2.0
"""Elastic tree speculative decoding (ECHO, arXiv:2604.09603) for vLLM 0.32.

core         ECHO: the stages of a step; core/pipeline.py is the page to read first
ops          typed wrappers over the compiled operators of csrc/
reference    the obvious version of every stage, for tests
integration  where vLLM is touched, and nowhere else
calibration  gates, acceptance and cost, measured and fitted
demo         a draft head and what it takes to serve it
cli          the `vllm-echo` command

Importing this package imports neither PyTorch nor vLLM.
"""

from vllm_echo.version import __version__

__all__ = ["__version__"]
