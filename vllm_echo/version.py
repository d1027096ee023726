# SPDX-License-Identifier: Apache-2.0
"""The one place that knows the version of vllm-echo."""

__version__ = "0.1.0"
